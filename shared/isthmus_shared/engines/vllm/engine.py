"""`VllmEngine`: the engine port over vLLM. Owns the step loop and every sequence's end.

vLLM runs in one thread of its own; between two steps, and only there, requests go in and out of it. A sequence's end
is told only when nothing is held for it any more: its blocks are free, and its staging is sealed or quiet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum

import structlog
from structlog.typing import FilteringBoundLogger

from isthmus_shared.engines.config import EngineConfig
from isthmus_shared.engines.kv_port import KvSink
from isthmus_shared.engines.port import EngineInfo, EngineLoad, EngineRequest, SequenceOutput, StepReport
from isthmus_shared.engines.reports import ReportQueue, SpeedMeter
from isthmus_shared.engines.vllm.admission import check_form, check_queue, check_room, check_transfer
from isthmus_shared.engines.vllm.core import VllmCore
from isthmus_shared.engines.vllm.live import Live, Phase
from isthmus_shared.engines.vllm.turns import NewRequest, Turn
from isthmus_shared.errors import (
    Cancelled,
    Draining,
    EngineFailed,
    InvalidRequest,
    IsthmusError,
    StaleParty,
    TransferFailed,
    Unavailable,
)
from isthmus_shared.ids import RequestId
from isthmus_shared.kv.manifest import KvManifest
from isthmus_shared.messages.work import FinishReason

IDLE_TURN_S = 0.001
"""Between two turns of which the first moved nothing: a transfer's thread needs the interpreter more than we do."""
MAX_CLOSING_TURNS = 10_000
"""At the end, for transfers that are under way to be let go: ten seconds, far beyond a copy."""

STEP_FAULTS = (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError, OSError, MemoryError, AssertionError)
"""What vLLM may raise in a step. Its state is then unknown, so the engine is over."""

_CANCELLED = Cancelled("the sequence was aborted").to_fault()
_STOPPED = Draining("the engine was stopped", todo="plan the request anew").to_fault()


class EngineState(StrEnum):
    NEW = "new"
    READY = "ready"
    STOPPED = "stopped"
    FAILED = "failed"


class VllmEngine:
    """See `engines.port.Engine`. All but vLLM's own thread happens on the event loop's."""

    def __init__(self, config: EngineConfig, build: Callable[[EngineConfig], VllmCore] = VllmCore.build) -> None:
        self._config, self._build = config, build
        self._log: FilteringBoundLogger = structlog.get_logger()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-engine")
        self._reports, self._speed = ReportQueue(), SpeedMeter()
        self._wake = asyncio.Event()
        self._lives: dict[str, Live] = {}
        self._by_id: dict[RequestId, Live] = {}
        self._new: list[Live] = []
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._next_uid = 0
        self._owner: asyncio.Task[None] | None = None
        self._group: asyncio.TaskGroup
        self._core: VllmCore
        self._blocks_free = 0
        self._settled = True
        """vLLM's workers know of every end: there is nothing left to step."""
        self._limit = 0
        self._last_fault = _STOPPED
        """Of what is still there when the engine is over."""
        self.preemptions = 0
        """Sequences put back to recompute, since the start."""
        self.state = EngineState.NEW

    # -- the port ---------------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        assert self.state is EngineState.NEW, "an engine starts once"
        self._loop = asyncio.get_running_loop()
        started = False
        try:
            self._core = await self._loop.run_in_executor(self._thread, self._build, self._config)
            started = True
        finally:
            if not started:
                self.state = EngineState.FAILED
                self._thread.shutdown(wait=False)  # it may be loading still; the loop has other work
        info = self._core.info
        self._blocks_free = info.blocks_total
        self._limit = min(info.max_model_len_tokens, info.blocks_total * info.block_tokens)
        entered = asyncio.Event()
        self._owner = asyncio.create_task(self._own(entered), name="vllm-steps")
        await entered.wait()
        self.state = EngineState.READY
        return EngineInfo(
            model=self._config.model_name,
            model_fingerprint=info.shape.model_fingerprint,
            max_model_len_tokens=self._limit,
            kv_layout=info.layout,
            kv_blocks_total=info.blocks_total,
            kv_block_tokens=info.block_tokens,
        )

    def manifest(self, prompt_tokens: int) -> KvManifest:
        return self._core.info.shape.manifest(prompt_tokens)

    def submit(self, request: EngineRequest) -> None:
        self._check(request)
        phase = Phase.WAITING if request.kv_load is None else Phase.LOADING
        live = Live(name=f"isthmus-{self._next_uid}", request=request, phase=phase)
        self._next_uid += 1
        self._lives[live.name] = self._by_id[request.request_id] = live
        if request.kv_save is not None:
            live.sink = self._core.flows.put_sink(live.name, request.kv_save, self._wake_soon)
        if request.kv_load is None:
            self._new.append(live)
        else:
            self._watchers[live.name] = self._group.create_task(self._watch(live))
        self._wake.set()

    def start_decode(self, request_id: RequestId, first_token_id: int) -> None:
        live = self._by_id.get(request_id)
        if live is None or not live.awaits_first_token:
            return
        if not 0 <= first_token_id < self._core.info.vocab_size:
            error = InvalidRequest(f"first token {first_token_id} is not in the vocabulary", param="first_token_id")
            live.end(FinishReason.ERROR, error.to_fault())
        else:
            live.first_token_id = first_token_id
            self._start_loaded(live)
        self._wake.set()

    def abort(self, request_id: RequestId) -> None:
        live = self._by_id.pop(request_id, None)  # at once: the id may be submitted anew before the step ends
        if live is not None:
            live.end(FinishReason.CANCELLED)
            self._wake.set()

    async def pause(self, request_id: RequestId) -> int:
        raise Unavailable(
            "this engine cannot give a running sequence away",
            why="vLLM's connectors save only what a prefill computes",
            todo="let it finish, or plan the request anew",
        )

    def save(self, request_id: RequestId, sink: KvSink) -> None:
        raise StaleParty(f"sequence {request_id} is not paused")

    def resume(self, request_id: RequestId) -> None:
        """None is ever paused."""

    def steps(self) -> AsyncIterator[StepReport]:
        return self._reports.iterate()

    def load(self) -> EngineLoad:
        phases = [live.phase for live in self._lives.values()]
        waiting = [live for live in self._lives.values() if live.phase is Phase.WAITING]
        return EngineLoad(
            running=phases.count(Phase.RUNNING) + phases.count(Phase.ENDING),
            waiting=len(waiting),
            loading=phases.count(Phase.LOADING),
            queued_prefill_tokens=sum(len(one.request.token_ids) for one in waiting if one.source is None),
            kv_blocks_free=self._blocks_free,
            decode_step_s=self._speed.decode_step_s,
            prefill_tokens_per_s=self._speed.prefill_tokens_per_s,
        )

    @property
    def prefixes(self) -> None:
        """vLLM caches prefixes, but names its blocks otherwise than others are told of them."""
        return None

    def check_invariants(self) -> None:
        """Raises AssertionError if something is lost or held twice. For tests and diagnosis."""
        assert self._watchers.keys() <= self._lives.keys(), "a watcher outlived its sequence"
        assert {live.name for live in self._by_id.values()} <= self._lives.keys(), "an ended sequence is still known"
        assert len(self._core.flows) <= len(self._lives), "a flow outlived its sequence"

    async def stop(self) -> None:
        owner, self._owner = self._owner, None
        if self.state is not EngineState.FAILED:
            self.state = EngineState.STOPPED
        self._reports.drain()
        self._wake.set()
        if owner is None:  # never started, or stopped already
            self._reports.close()
            return
        try:
            await owner
        finally:
            await self._loop.run_in_executor(self._thread, self._core.close)
            self._thread.shutdown()

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def _own(self, entered: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                entered.set()
                await self._turn_until_stopped()
                for watcher in self._watchers.values():
                    watcher.cancel()
        finally:
            self._reports.close()

    async def _turn_until_stopped(self) -> None:
        while self.state in (EngineState.NEW, EngineState.READY):
            self._wake.clear()
            if not self._new and self._settled and not any(live.in_vllm for live in self._lives.values()):
                await self._tell(self._collect())
                if not self._new and not self._wake.is_set():
                    await self._wake.wait()
                continue
            if not await self._turn():
                await self._pause()
        if self.state is EngineState.STOPPED:
            for live in self._lives.values():
                live.end(FinishReason.CANCELLED)
        for _ in range(MAX_CLOSING_TURNS):
            if not self._lives or self.state is EngineState.FAILED:
                break
            if not await self._turn():
                await self._pause()
        await self._give_up()

    async def _turn(self) -> bool:
        """One step of vLLM. Whether it moved anything."""
        new, aborted = self._take_new(), self._take_aborted()
        try:
            turn = await self._loop.run_in_executor(self._thread, self._core.turn, new, aborted)
        except STEP_FAULTS as error:
            self.state = EngineState.FAILED
            self._log.error("engine.failed", exc_info=error)
            failed = EngineFailed("vLLM failed", why=f"{type(error).__name__}: {error}", todo="restart the worker")
            self._last_fault = failed.to_fault()
            return True
        self._blocks_free, self.preemptions, self._settled = turn.blocks_free, turn.preemptions, turn.idle
        outputs = self._apply(turn)
        outputs += self._collect()
        await self._tell(outputs, turn)
        return bool(outputs or turn.prefill_tokens or turn.decode_sequences)

    def _take_new(self) -> list[NewRequest]:
        new, self._new = self._new, []
        taken = []
        for live in new:
            if live.phase is Phase.ENDING:
                continue
            live.in_vllm = True
            manifest = self.manifest(live.request.loaded_tokens or len(live.request.token_ids))
            taken.append(live.for_vllm(manifest, self._core.info.eos_token_ids))
        return taken

    def _take_aborted(self) -> list[str]:
        """Those that vLLM is to end, and of which nothing but the end is still to come. Asking twice does no harm."""
        return [live.name for live in self._lives.values() if live.phase is Phase.ENDING and live.in_vllm]

    def _apply(self, turn: Turn) -> list[SequenceOutput]:
        for name, why in turn.refused:
            live = self._lives[name]
            live.in_vllm = False
            live.end(FinishReason.ERROR, InvalidRequest("vLLM refuses the request", why=why).to_fault())
        outputs = []
        for progress in turn.progress:
            live = self._lives[progress.name]
            output = live.take(progress, self._core.info.eos_token_ids)
            if output is not None:
                outputs.append(output)
        for name in turn.released:
            if name in self._lives:
                self._lives[name].in_vllm = False
        return outputs

    def _collect(self) -> list[SequenceOutput]:
        """The terminal outputs of all that is over."""
        outputs = []
        for live in list(self._lives.values()):
            if live.sink is not None and live.sink.fault is not None and live.phase is not Phase.ENDING:
                live.end(FinishReason.ERROR, live.sink.fault)
            if live.phase is not Phase.ENDING:
                continue
            self._let_go(live)
            if live.over():
                self._forget(live)
                outputs.append(live.last_output())
        return outputs

    def _let_go(self, live: Live) -> None:
        watcher = self._watchers.pop(live.name, None)
        if watcher is not None:
            watcher.cancel()
        if live.sink is not None and live.finish in (FinishReason.CANCELLED, FinishReason.ERROR):
            live.sink.abort(live.fault or _CANCELLED)
        if live.source is not None and not live.in_vllm:
            live.source.release()
        elif live.source is None and live.request.kv_load is not None:
            live.request.kv_load.release()

    def _forget(self, live: Live) -> None:
        del self._lives[live.name]
        if self._by_id.get(live.request.request_id) is live:
            del self._by_id[live.request.request_id]
        self._core.flows.drop(live.name)

    async def _tell(self, outputs: list[SequenceOutput], turn: Turn | None = None) -> None:
        report = StepReport(
            outputs=tuple(outputs),
            step_s=0.0 if turn is None else turn.took_s,
            prefill_tokens=0 if turn is None else turn.prefill_tokens,
            decode_sequences=0 if turn is None else turn.decode_sequences,
        )
        self._speed.note(report)
        if outputs:
            await self._reports.put(report)

    async def _give_up(self) -> None:
        """What is still there when the engine is over: it ends all the same, and so do its flows."""
        outputs = []
        for live in list(self._lives.values()):
            live.in_vllm = False
            live.fail(self._last_fault)
            self._let_go(live)
            self._forget(live)
            outputs.append(live.last_output())
        await self._tell(outputs)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(IDLE_TURN_S):
                await self._wake.wait()
        except TimeoutError:
            pass

    # -- pieces -----------------------------------------------------------------------------------------------------

    async def _watch(self, live: Live) -> None:
        source = live.request.kv_load
        assert source is not None, "only decode-only sequences are watched"
        try:
            await source.ready()
        except IsthmusError as error:
            live.end(FinishReason.ERROR, error.to_fault())
        except OSError as error:
            live.end(FinishReason.ERROR, TransferFailed("the KV source failed", why=str(error)).to_fault())
        else:
            live.source_ready = True
            self._start_loaded(live)
        self._wake.set()

    def _start_loaded(self, live: Live) -> None:
        if not live.can_start:
            return
        assert live.request.kv_load is not None
        if live.first_token_id is not None:
            eos_token_ids = self._core.info.eos_token_ids
            finish = live.finish_after(live.first_token_id, live.request.output_offset, eos_token_ids)
            if finish is not None:
                live.end(finish)
                return
        live.source = self._core.flows.put_source(live.name, live.request.kv_load)
        live.phase = Phase.WAITING
        self._new.append(live)

    def _wake_soon(self) -> None:
        """From any thread."""
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            pass  # the loop is closed: nobody waits

    def _check(self, request: EngineRequest) -> None:
        if self.state is EngineState.FAILED:
            raise EngineFailed("this engine has failed", todo="restart the worker")
        if self.state is not EngineState.READY:
            raise Draining(f"this engine is {self.state}")
        if request.request_id in self._by_id:
            raise InvalidRequest(f"request {request.request_id} is here already", param="request_id")
        check_form(request, vocab_size=self._core.info.vocab_size)
        check_transfer(request, self.manifest(request.loaded_tokens or len(request.token_ids)))
        check_room(request, limit_tokens=self._limit)
        queued = sum(live.phase in (Phase.WAITING, Phase.LOADING) for live in self._lives.values())
        check_queue(queued, self._config.max_waiting)
