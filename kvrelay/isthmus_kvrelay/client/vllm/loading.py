"""The consumer's side of one rank: landed KV into cache blocks that the engine does not read yet."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from isthmus_kvrelay.client.vllm.cache import Fence, RankCache
from isthmus_kvrelay.client.vllm.copier import Copier
from isthmus_kvrelay.client.vllm.flows import RankFlow, consumer_flows
from isthmus_kvrelay.client.vllm.jobs import Discard, LoadJob, Origin, StepJobs
from isthmus_kvrelay.client.vllm.rank import Rank
from isthmus_shared.engines.kv_port import KvSource
from isthmus_shared.errors import Cancelled, IsthmusError, ManifestMismatch, StaleParty

RETRY_MIN_S = 0.01
RETRY_MAX_S = 0.25
"""Between two questions for a transfer that is not there yet."""
DISCARD_S = 5.0
"""For a transfer that nobody wants to be found and released."""


@dataclass(slots=True)
class _Load:
    job: LoadJob
    began_s: float
    after: Fence = None
    """What the engine was doing when it gave the blocks."""
    flows: tuple[RankFlow, ...] = ()
    left: int = 0
    """Flows that are still fetched or copied; each ends once."""
    error: IsthmusError | None = None
    fetches: list[asyncio.Task[KvSource]] = field(default_factory=list)


class Loader:
    def __init__(self, rank: Rank, cache: RankCache) -> None:
        self._rank, self._cache = rank, cache
        self._lock = threading.Lock()
        self._loads: dict[str, _Load] = {}
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._copier = Copier("isthmus-load")

    # --- hooks

    def begin_step(self, jobs: StepJobs) -> None:
        for request_id in jobs.cancelled:
            self._fail(request_id, Cancelled("the request has ended"))
        for job in jobs.loads:
            self._begin(job, jobs.fingerprint)
        for discard in jobs.discarded:
            self._rank.relay.post(partial(self._discard, discard, jobs.fingerprint))

    def take(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks are written to no more, and those of them that have not got their KV."""
        if not self._received:
            return set(), set()
        with self._lock:
            received, failed = self._received, self._failed
            self._received, self._failed = set(), set()
        return received, failed

    @property
    def in_flight(self) -> int:
        return len(self._loads)

    def stop(self) -> None:
        for request_id in list(self._loads):
            self._fail(request_id, Cancelled("the engine is stopping"))
        self._copier.stop(timeout_s=5.0)

    # --- fetching, on the relay's loop

    def _begin(self, job: LoadJob, fingerprint: str) -> None:
        load = _Load(job, time.monotonic(), self._cache.fence())
        self._loads[job.request_id] = load
        if job.refusal is not None:
            load.error = ManifestMismatch(job.refusal)
            self._settle(load)
            return
        self._rank.relay.post(partial(self._fetch_all, load, fingerprint))

    async def _fetch_all(self, load: _Load, fingerprint: str) -> None:
        load.flows = consumer_flows(load.job.flow, self._rank.shape(fingerprint), self._rank.rank)
        load.left = len(load.flows)
        with self._lock:
            if load.error is None:
                origin = load.job.origin
                load.fetches = [asyncio.create_task(self._fetch(load, flow, origin)) for flow in load.flows]
        if not load.fetches:
            self._settle(load)
            return
        for flow, fetch in zip(load.flows, load.fetches, strict=True):
            try:
                source = await fetch
            except IsthmusError as error:
                self._fail(load.job.request_id, error)
                self._ended(load, 1)
            except asyncio.CancelledError:
                if not fetch.cancelled():
                    raise
                self._ended(load, 1)
            else:
                self._copier.put(partial(self._copy, load, flow, source))

    async def _fetch(self, load: _Load, flow: RankFlow, origin: Origin) -> KvSource:
        """The flow, landed and checked. A transfer that is not there yet is asked for again, each time anew."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + load.job.deadline_s
        appear_s, pull, pause_s = loop.time() + self._rank.appear_s, origin.pull, RETRY_MIN_S
        while True:
            source = await self._rank.relay.require().open_source(
                flow.ticket(origin, pull), deadline_s=max(0.1, end_s - loop.time())
            )
            arrived = False
            try:
                await source.ready()
                arrived = True
                return source
            except StaleParty:
                if loop.time() + pause_s >= min(appear_s, end_s):
                    raise
            finally:
                if not arrived:
                    source.release()
            await asyncio.sleep(pause_s)
            pull, pause_s = pull + 1, min(2 * pause_s, RETRY_MAX_S)

    async def _discard(self, discard: Discard, fingerprint: str) -> None:
        """Taken and let go, so that the other side's staging is free before its deadline."""
        for flow in consumer_flows(discard.flow, self._rank.shape(fingerprint), self._rank.rank):
            try:
                relay = self._rank.relay.require()
                source = await relay.open_source(flow.ticket(discard.origin, discard.origin.pull), deadline_s=DISCARD_S)
            except IsthmusError as error:
                self._rank.log(f"transfer {flow.transfer_id} is left to its deadline: {error.text}")
                continue
            try:
                await source.ready()
            except IsthmusError as error:
                self._rank.log(f"transfer {flow.transfer_id} was not there to be discarded: {error.text}")
            finally:
                source.release()

    # --- copying

    def _copy(self, load: _Load, flow: RankFlow, source: KvSource) -> None:
        tokens = range(load.job.start, load.job.end)
        try:
            for layer in flow.index.layers:
                if load.error is not None:
                    break
                self._cache.load(flow, layer, load.job.blocks, tokens, source.map, load.after)
        except IsthmusError as error:
            self._fail(load.job.request_id, error)
        finally:
            source.release()
            self._ended(load, 1)

    # --- ends

    def _fail(self, request_id: str, error: IsthmusError) -> None:
        """The first error counts. Fetches are cancelled; a copy under way ends by itself."""
        with self._lock:
            load = self._loads.get(request_id)
            if load is None or load.error is not None:
                return
            load.error = error
            fetches: Sequence[asyncio.Task[KvSource]] = tuple(load.fetches)
        if fetches:
            self._rank.relay.post(partial(_cancel, fetches))

    def _ended(self, load: _Load, flows: int) -> None:
        with self._lock:
            load.left -= flows
            assert load.left >= 0, "a flow ended twice"
            if load.left:
                return
        self._settle(load)

    def _settle(self, load: _Load) -> None:
        """Nothing of it is under way."""
        request_id, took_s = load.job.request_id, time.monotonic() - load.began_s
        if load.error is None:
            self._rank.stats.loaded(sum(flow.index.total_bytes for flow in load.flows), took_s)
        else:
            self._rank.stats.load_failed()
            self._rank.log(f"KV of {load.job.flow.transfer_id} was not loaded: {load.error.text}")
        with self._lock:
            del self._loads[request_id]
            self._received.add(request_id)
            if load.error is not None:
                self._failed.add(request_id)


async def _cancel(fetches: Sequence[asyncio.Task[KvSource]]) -> None:
    for fetch in fetches:
        fetch.cancel()
