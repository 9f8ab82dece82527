"""`BatchingEngine`: the engine port over a `Scheduler` and a `Runner`. Owns the step loop and every sequence's end.

Between two steps, and only there, sequences end and blocks are freed. One task loops over the steps; one task per
decode-only sequence watches its source; all live in one TaskGroup, which `stop` awaits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from enum import StrEnum

from isthmus_shared.engines.checks import ABORTED, check_tokens, check_transfer, ended, limits_of
from isthmus_shared.engines.config import EngineConfig
from isthmus_shared.engines.giving import Giving
from isthmus_shared.engines.kv_port import KvSink
from isthmus_shared.engines.port import EngineInfo, EngineLoad, EngineRequest, SequenceOutput, StepReport
from isthmus_shared.engines.prefix_log import PrefixLog
from isthmus_shared.engines.reports import ReportQueue, SpeedMeter
from isthmus_shared.engines.runner_port import RUNNER_FAULTS, Runner, RunnerInfo, WorkResult, step_fault
from isthmus_shared.engines.scheduler import Scheduler
from isthmus_shared.engines.sequence import Batch, Phase, Work
from isthmus_shared.engines.sequence import Sequence as SequenceState
from isthmus_shared.errors import (
    Draining,
    EngineFailed,
    Fault,
    InvalidRequest,
    IsthmusError,
    StaleParty,
    TransferFailed,
)
from isthmus_shared.ids import RequestId
from isthmus_shared.kv.manifest import KvManifest
from isthmus_shared.messages.work import FinishReason

MAX_FAILURES_IN_A_ROW = 3
"""Steps that may raise in a row before the engine gives up: a bad batch is survived, a broken device is not."""


class EngineState(StrEnum):
    NEW = "new"
    READY = "ready"
    STOPPED = "stopped"
    FAILED = "failed"


class BatchingEngine:
    """See `engines.port.Engine`. Everything but the runner's own thread happens on the event loop's thread."""

    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        self._runner, self._config = runner, config
        self._reports, self._speed = ReportQueue(), SpeedMeter()
        self._wake = asyncio.Event()
        self._by_id: dict[RequestId, SequenceState] = {}
        self._watchers: dict[int, asyncio.Task[None]] = {}
        self._endings: list[tuple[SequenceState, FinishReason, Fault | None]] = []
        self._failures_in_a_row = 0
        self._owner: asyncio.Task[None] | None = None
        self._group: asyncio.TaskGroup
        self._info: RunnerInfo
        self._scheduler: Scheduler
        self._giving: Giving
        self.state = EngineState.NEW

    # -- the port ---------------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        assert self.state is EngineState.NEW, "an engine starts once"
        info = self._info = await self._start_runner()
        limits = limits_of(info, self._config)
        self._scheduler = Scheduler(limits)
        self._giving = Giving(self._scheduler)
        entered = asyncio.Event()
        self._owner = asyncio.create_task(self._own(entered), name="engine-steps")
        await entered.wait()
        self.state = EngineState.READY
        return EngineInfo(
            model=self._config.model_name,
            model_fingerprint=info.shape.model_fingerprint,
            max_model_len_tokens=limits.max_model_len_tokens,
            kv_layout=info.layout.describe(),
            kv_blocks_total=info.blocks_total,
            kv_block_tokens=info.layout.block_tokens,
        )

    def manifest(self, prompt_tokens: int) -> KvManifest:
        return self._info.shape.manifest(prompt_tokens)

    def submit(self, request: EngineRequest) -> None:
        if self.state is EngineState.FAILED:
            raise EngineFailed("this engine has failed", todo="restart the worker")
        if self.state is not EngineState.READY:
            raise Draining(f"this engine is {self.state}")
        if request.request_id in self._by_id:
            raise InvalidRequest(f"request {request.request_id} is here already", param="request_id")
        check_tokens(request.token_ids, self._info.vocab_size)
        check_transfer(request, self._info.shape)
        sequence = self._scheduler.submit(request)
        sequence.submitted_s = asyncio.get_running_loop().time()
        self._by_id[request.request_id] = sequence
        if request.kv_load is not None:
            self._watchers[sequence.uid] = self._group.create_task(self._watch(sequence))
        self._wake.set()

    def start_decode(self, request_id: RequestId, first_token_id: int) -> None:
        sequence = self._by_id.get(request_id)
        if sequence is None or sequence.phase is not Phase.LOADING:
            return
        if not 0 <= first_token_id < self._info.vocab_size:
            error = InvalidRequest(f"first token {first_token_id} is not in the vocabulary", param="first_token_id")
            self._end_later(sequence, FinishReason.ERROR, error.to_fault())
        elif self._scheduler.first_token(sequence, first_token_id):
            self._queued_with_kv(sequence)

    def abort(self, request_id: RequestId) -> None:
        sequence = self._by_id.pop(request_id, None)  # at once: the id may be submitted anew before the step ends
        if sequence is not None:
            self._end_later(sequence, FinishReason.CANCELLED, None)

    async def pause(self, request_id: RequestId) -> int:
        paused = self._giving.asked(self._known(request_id))
        self._wake.set()
        return await paused

    def save(self, request_id: RequestId, sink: KvSink) -> None:
        sequence = self._known(request_id)
        self._giving.save(sequence, sink, total_bytes=self.manifest(max(1, sequence.computed)).total_bytes)
        self._wake.set()

    def resume(self, request_id: RequestId) -> None:
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._giving.resume(sequence)
            self._wake.set()

    def _known(self, request_id: RequestId) -> SequenceState:
        sequence = self._by_id.get(request_id)
        if sequence is None or self.state is not EngineState.READY:
            raise StaleParty(f"sequence {request_id} is not here", why="it has ended, or never was")
        return sequence

    def steps(self) -> AsyncIterator[StepReport]:
        return self._reports.iterate()

    def load(self) -> EngineLoad:
        scheduler = self._scheduler
        return EngineLoad(
            running=len(scheduler.running) + len(scheduler.paused),
            waiting=len(scheduler.waiting),
            loading=len(scheduler.loading),
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            kv_blocks_free=scheduler.pool.free,
            decode_step_s=self._speed.decode_step_s,
            prefill_tokens_per_s=self._speed.prefill_tokens_per_s,
        )

    @property
    def prefixes(self) -> PrefixLog | None:
        return self._scheduler.pool.prefixes if self._config.prefix_cache else None

    @property
    def preemptions(self) -> int:
        """Sequences put back to recompute, since the start."""
        return self._scheduler.preemptions

    def check_invariants(self) -> None:
        """Raises AssertionError if a block, sequence or watcher is lost or held twice. For tests and diagnosis."""
        self._scheduler.check_invariants()
        alive = {sequence.uid for sequence in self._scheduler.everyone}
        assert set(self._watchers) <= alive, "a watcher outlived its sequence"
        assert {sequence.uid for sequence in self._by_id.values()} <= alive, "an ended sequence is still known"

    async def stop(self) -> None:
        owner, self._owner = self._owner, None
        self.state = EngineState.STOPPED
        self._reports.drain()
        self._wake.set()
        if owner is None:  # never started, or stopped already
            self._reports.close()
            return
        try:
            await owner
        finally:
            await self._runner.stop()

    async def _start_runner(self) -> RunnerInfo:
        started = False
        try:
            info = await self._runner.start()
            started = True
        finally:
            if not started:  # its thread must not outlive a model that cannot be loaded
                self.state = EngineState.FAILED
                await self._runner.stop()
        return info

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def _own(self, entered: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                entered.set()
                await self._step_until_stopped()
                for watcher in self._watchers.values():
                    watcher.cancel()
        finally:
            if self.state in (EngineState.NEW, EngineState.READY):
                await self._abandon()
            self._reports.close()

    async def _abandon(self) -> None:
        """The loop broke on a bug of ours: nobody may wait for ever for a sequence that no step will touch again."""
        self.state = EngineState.FAILED
        self._reports.drain()
        await self._runner.stop()  # first: its thread may still be writing to a sink
        fault = EngineFailed("the engine broke down", todo="restart the worker, and report its log").to_fault()
        outputs = []
        for sequence in self._scheduler.everyone:
            if sequence.request.kv_load is not None:
                sequence.request.kv_load.release()
            if sequence.sink is not None:
                sequence.sink.abort(fault)
            outputs.append(ended(sequence, sequence.next_output_index, FinishReason.ERROR, fault))
        await self._emit(outputs)

    async def _step_until_stopped(self) -> None:
        fault: Fault | None = None
        while self.state in (EngineState.NEW, EngineState.READY):
            self._wake.clear()
            # Nothing may come between these two: a sequence that is to end must not be scheduled.
            endings = self._apply_endings()
            self._giving.take()
            batch = self._scheduler.schedule()
            await self._emit(endings)
            if not batch.works:
                await self._wake.wait()
                continue
            fault = await self._step(batch)
        self._giving.give_up(EngineFailed("the engine has stopped", todo="plan the request anew"))
        reason = FinishReason.CANCELLED if self.state is EngineState.STOPPED else FinishReason.ERROR
        for sequence in self._scheduler.everyone:
            self._end_later(sequence, reason, fault if reason is FinishReason.ERROR else None)
        await self._emit(self._apply_endings())

    async def _step(self, batch: Batch) -> Fault | None:
        fault: Fault | None = None
        took_s, prefill_tokens = 0.0, batch.prefill_tokens
        begun_s = asyncio.get_running_loop().time()
        try:
            step = await self._runner.execute(batch)
        except RUNNER_FAULTS as error:
            fault = step_fault(error)
            outputs = self._fail_running(batch, fault)
        else:
            self._failures_in_a_row = 0
            took_s = step.took_s
            if prefill_tokens:
                batch.note_prefill(begun_s=begun_s, ended_s=asyncio.get_running_loop().time())
            outputs = self._take(batch, step.results)
        report = StepReport(
            outputs=tuple(outputs),
            step_s=took_s,
            prefill_tokens=prefill_tokens,
            decode_sequences=batch.decode_sequences,
            kv_loads=batch.kv_loads,
        )
        self._speed.note(report)
        if outputs:
            await self._reports.put(report)
        return fault

    def _take(self, batch: Batch, results: Sequence[WorkResult]) -> list[SequenceOutput]:
        indexes = [work.sequence.next_output_index for work in batch.works]
        pairs = list(zip(batch.works, results, strict=True))
        sampled = {w.sequence.uid: r.token_id for w, r in pairs if w.sample and r.token_id is not None}
        self._scheduler.commit(batch, sampled, {w.sequence.uid for w, r in pairs if r.fault is not None})
        outputs = []
        for (work, result), index in zip(pairs, indexes, strict=True):
            output = self._take_one(work, result, index)
            if output is not None:
                outputs.append(output)
        return outputs

    def _take_one(self, work: Work, result: WorkResult, index: int) -> SequenceOutput | None:
        sequence = work.sequence
        if work.copies:
            return self._copied(sequence, result)
        if work.load and sequence.request.kv_load is not None:
            sequence.request.kv_load.release()
        if result.fault is not None:
            return self._end(sequence, FinishReason.ERROR, result.fault)
        if result.token_id is None:
            assert not work.sample, "the runner sampled nothing"
            return None
        finish = sequence.finish_after(result.token_id, index, self._info.eos_token_ids)
        if finish is None and sequence.request.kv_save is not None:
            finish = FinishReason.HANDOFF
        fault = None if finish is None else self._free(sequence, finish, None)
        if fault is not None:
            return ended(sequence, index, FinishReason.ERROR, fault)
        return SequenceOutput(
            request_id=sequence.request.request_id,
            output_index=index,
            token_ids=(result.token_id,),
            logprobs=None if result.logprob is None else (result.logprob,),
            finish=finish,
            cached_tokens=(sequence.cached or 0) if index == sequence.request.output_offset else 0,
            prefill=sequence.prefill_times() if index == sequence.request.output_offset else None,
        )

    def _copied(self, sequence: SequenceState, result: WorkResult) -> SequenceOutput | None:
        """A piece of a sequence that is given away; the last one ends it here."""
        if result.fault is not None:
            self._giving.keep(sequence, result.fault)
            return None
        if sequence.saved < sequence.computed:
            return None
        index = sequence.next_output_index
        fault = self._free(sequence, FinishReason.HANDOFF, None)
        return ended(sequence, index, FinishReason.HANDOFF if fault is None else FinishReason.ERROR, fault)

    def _fail_running(self, batch: Batch, fault: Fault) -> list[SequenceOutput]:
        self._scheduler.commit(batch, {}, {work.sequence.uid for work in batch.works})
        self._giving.step_failed(batch, fault)
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW and self.state is EngineState.READY:
            self.state = EngineState.FAILED
        ended = [self._end(sequence, FinishReason.ERROR, fault) for sequence in list(self._scheduler.running)]
        self._scheduler.distrust()
        return ended

    # -- ends -------------------------------------------------------------------------------------------------------

    def _end_later(self, sequence: SequenceState, finish: FinishReason, fault: Fault | None) -> None:
        self._endings.append((sequence, finish, fault))
        self._wake.set()

    def _apply_endings(self) -> list[SequenceOutput]:
        endings, self._endings = self._endings, []
        # A sequence may have ended by itself, or been ended twice, since it was noted here: the first end counts.
        return [self._end(s, finish, fault) for s, finish, fault in endings if s.phase is not Phase.DONE]

    def _end(self, sequence: SequenceState, finish: FinishReason, fault: Fault | None) -> SequenceOutput:
        index = sequence.next_output_index
        self._free(sequence, finish, fault)
        return ended(sequence, index, finish, fault)

    def _free(self, sequence: SequenceState, finish: FinishReason, fault: Fault | None) -> Fault | None:
        """Everything that the sequence holds, exactly once. A fault if its KV could not be sealed after all."""
        self._scheduler.finish(sequence)
        request, sink = sequence.request, sequence.sink
        if self._by_id.get(request.request_id) is sequence:
            del self._by_id[request.request_id]
        watcher = self._watchers.pop(sequence.uid, None)
        if watcher is not None:
            watcher.cancel()
        if request.kv_load is not None:
            request.kv_load.release()
        if sink is None:
            return None
        if finish in (FinishReason.ERROR, FinishReason.CANCELLED):
            sink.abort(fault or ABORTED)
            return None
        try:
            sink.seal()
        except IsthmusError as error:
            sink.abort(error.to_fault())
            return error.to_fault()
        return None

    # -- pieces -----------------------------------------------------------------------------------------------------

    async def _watch(self, sequence: SequenceState) -> None:
        source = sequence.request.kv_load
        assert source is not None, "only decode-only sequences are watched"
        try:
            await source.ready()
        except IsthmusError as error:
            self._end_later(sequence, FinishReason.ERROR, error.to_fault())
        except OSError as error:
            lost = TransferFailed("the KV source failed", why=str(error))
            self._end_later(sequence, FinishReason.ERROR, lost.to_fault())
        else:
            if self._scheduler.source_ready(sequence):
                self._queued_with_kv(sequence)

    def _queued_with_kv(self, sequence: SequenceState) -> None:
        if not sequence.request.resumes:
            first = sequence.tokens[-1]
            finish = sequence.finish_after(first, sequence.request.output_offset, self._info.eos_token_ids)
            if finish is not None:
                self._end_later(sequence, finish, None)
        self._wake.set()

    async def _emit(self, outputs: list[SequenceOutput]) -> None:
        if outputs:
            await self._reports.put(StepReport(tuple(outputs), step_s=0.0, prefill_tokens=0, decode_sequences=0))
