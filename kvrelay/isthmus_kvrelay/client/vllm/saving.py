"""The producer's side of one rank: cache blocks into staging, layer by layer, while the engine computes on.

Hooks run on the engine's thread and only note what is to be done; the relay's loop opens flows; the copier copies.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from isthmus_kvrelay.client.vllm.cache import Fence, RankCache
from isthmus_kvrelay.client.vllm.copier import Copier
from isthmus_kvrelay.client.vllm.flows import RankFlow, producer_flows
from isthmus_kvrelay.client.vllm.jobs import SaveJob, StepJobs
from isthmus_kvrelay.client.vllm.rank import Rank
from isthmus_shared.engines.kv_port import KvSink
from isthmus_shared.errors import Cancelled, Fault, IsthmusError

DROPPED = Fault(code=Cancelled.code, what="the request ended before its KV was complete")
STOPPED = Fault(code=Cancelled.code, what="the engine is stopping")


class SaveState(Enum):
    OPENING = auto()
    FILLING = auto()
    SEALED = auto()
    ABORTED = auto()


@dataclass(slots=True)
class _Transfer:
    job: SaveJob
    flows: tuple[RankFlow, ...] = ()
    state: SaveState = SaveState.OPENING
    sinks: tuple[KvSink, ...] = ()
    copied: dict[int, int] = field(default_factory=dict)
    """layer → tokens of it that are staged"""
    epoch: int = 0
    """Counted up when the blocks of older jobs are no longer this request's."""
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Copies that wait for staging."""
    busy: bool = False
    """The copier is in its blocks."""
    finished: bool = False
    """The scheduler waits for it."""

    @property
    def over(self) -> bool:
        return self.state in (SaveState.SEALED, SaveState.ABORTED) and not self.busy


class Saver:
    def __init__(self, rank: Rank, cache: RankCache) -> None:
        self._rank, self._cache = rank, cache
        self._changed = threading.Condition()
        """Guards all transfers; notified when the copier leaves one."""
        self._transfers: dict[str, _Transfer] = {}
        self._step: tuple[tuple[_Transfer, int, SaveJob], ...] = ()
        self._left: set[int] = set()
        """Layers that the engine has not finished in this step."""
        self._copier = Copier("isthmus-save")

    # --- hooks

    def let_go(self, jobs: StepJobs) -> None:
        """Before the forward: blocks that are no longer a request's are not read from here on."""
        for request_id in jobs.preempted:
            with self._changed:
                transfer = self._transfers.get(request_id)
                if transfer is not None:
                    transfer.epoch += 1
                    transfer.waiting.clear()
                    self._changed.wait_for(partial(_is_left, transfer))

    def begin_step(self, jobs: StepJobs) -> None:
        for request_id in jobs.dropped:
            self._abort(request_id, DROPPED)
        work = []
        for job in jobs.saves:
            with self._changed:
                transfer = self._transfers.get(job.request_id)
                if transfer is None:
                    transfer = self._open(job, jobs.fingerprint)
                if transfer.state in (SaveState.OPENING, SaveState.FILLING):
                    work.append((transfer, transfer.epoch, job))
        self._step, self._left = tuple(work), set(self._cache.layers) if work else set()

    @property
    def active(self) -> bool:
        """Whether layers of this step are waited for."""
        return bool(self._left)

    @property
    def in_flight(self) -> int:
        return len(self._transfers)

    def layer_done(self, name: str) -> None:
        """The engine has written that layer for this step."""
        layer = self._cache.by_name.get(name)
        if layer is not None and layer in self._left:
            self._left.discard(layer)
            self._copier.put(partial(self._copy_step, self._step, (layer,), self._cache.fence()))

    def step_done(self) -> None:
        """The forward is over: what no hook was called for is copied too."""
        if self._left:
            self._copier.put(partial(self._copy_step, self._step, tuple(sorted(self._left)), self._cache.fence()))
        self._step, self._left = (), set()

    def take_sent(self, finished: Collection[str]) -> set[str]:
        """Of the requests that the scheduler has finished: those whose blocks are not needed any more."""
        if not self._transfers:
            return set()
        with self._changed:
            for request_id in finished:
                if request_id in self._transfers:
                    self._transfers[request_id].finished = True
            sent = {request_id for request_id, one in self._transfers.items() if one.finished and one.over}
            for request_id in sent:
                del self._transfers[request_id]
        return sent

    def stop(self) -> None:
        for request_id in list(self._transfers):
            self._abort(request_id, STOPPED)
        self._copier.stop(timeout_s=5.0)

    # --- opening

    def _open(self, job: SaveJob, fingerprint: str) -> _Transfer:
        transfer = _Transfer(job, copied=dict.fromkeys(self._cache.layers, 0))
        self._transfers[job.request_id] = transfer
        self._rank.relay.post(partial(self._open_sinks, transfer, fingerprint))
        return transfer

    async def _open_sinks(self, transfer: _Transfer, fingerprint: str) -> None:
        """A rank whose heads another one sends has no flows, and nothing to copy."""
        sinks: list[KvSink] = []
        try:
            transfer.flows = producer_flows(transfer.job.flow, self._rank.shape(fingerprint), self._rank.rank)
            for flow in transfer.flows:
                sink = await self._rank.relay.require().open_sink(
                    flow.transfer_id,
                    flow.generation,
                    flow.index.manifest,
                    deadline_s=transfer.job.deadline_s,
                    wait_s=self._rank.staging_wait_s,
                )
                sinks.append(sink)
        except IsthmusError as error:
            _abort_all(sinks, error.to_fault())
            self._abort(transfer.job.request_id, error.to_fault())
            return
        with self._changed:
            if transfer.state is SaveState.OPENING:
                transfer.state, transfer.sinks = SaveState.FILLING, tuple(sinks)
                for copy in transfer.waiting:
                    self._copier.put(copy)
                transfer.waiting.clear()
                return
        _abort_all(sinks, DROPPED)

    # --- copying

    def _copy_step(self, step: Sequence[tuple[_Transfer, int, SaveJob]], layers: Sequence[int], after: Fence) -> None:
        for transfer, epoch, job in step:
            self._copy(transfer, epoch, job, layers, after)

    def _copy(self, transfer: _Transfer, epoch: int, job: SaveJob, layers: Sequence[int], after: Fence) -> None:
        with self._changed:
            if transfer.epoch != epoch or transfer.state is SaveState.ABORTED:
                return
            if transfer.state is SaveState.OPENING:
                transfer.waiting.append(partial(self._copy, transfer, epoch, job, layers, after))
                return
            transfer.busy = True
        fault: Fault | None = None
        try:
            for layer in layers:
                self._copy_layer(transfer, job, layer, after)
            if all(done == job.flow.prompt_tokens for done in transfer.copied.values()):
                for sink in transfer.sinks:
                    sink.seal()
                self._end(transfer, SaveState.SEALED)
        except IsthmusError as error:
            fault = error.to_fault()
        finally:
            with self._changed:
                transfer.busy = False
                self._changed.notify_all()
        if fault is not None:
            self._abort(transfer.job.request_id, fault)
        if self._is_aborted(transfer):
            _abort_all(transfer.sinks, DROPPED)

    def _is_aborted(self, transfer: _Transfer) -> bool:
        with self._changed:
            return transfer.state is SaveState.ABORTED

    def _copy_layer(self, transfer: _Transfer, job: SaveJob, layer: int, after: Fence) -> None:
        tokens = range(transfer.copied[layer], job.computed)
        if not tokens:
            return
        for flow, sink in zip(transfer.flows, transfer.sinks, strict=True):
            for offset, size in self._cache.save(flow, layer, job.blocks, tokens, sink.map, after):
                sink.filled(offset, size)
        transfer.copied[layer] = job.computed

    # --- ends

    def _end(self, transfer: _Transfer, state: SaveState) -> None:
        with self._changed:
            if transfer.state is not SaveState.ABORTED:
                transfer.state = state
        if transfer.state is SaveState.SEALED:
            self._rank.stats.saved(sum(flow.index.total_bytes for flow in transfer.flows))

    def _abort(self, request_id: str, fault: Fault) -> None:
        with self._changed:
            transfer = self._transfers.get(request_id)
            if transfer is None or transfer.state in (SaveState.SEALED, SaveState.ABORTED):
                return
            transfer.state = SaveState.ABORTED
            transfer.waiting.clear()
            busy = transfer.busy
        self._rank.stats.save_failed()
        self._rank.log(f"KV of {transfer.job.flow.transfer_id} is not handed over: {fault.what} {fault.why}".strip())
        if not busy:
            _abort_all(transfer.sinks, fault)


def _abort_all(sinks: Sequence[KvSink], fault: Fault) -> None:
    for sink in sinks:
        with contextlib.suppress(IsthmusError):
            sink.abort(fault)


def _is_left(transfer: _Transfer) -> bool:
    return not transfer.busy
