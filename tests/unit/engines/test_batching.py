"""The step loop over a runner that fails on demand."""

from __future__ import annotations

import asyncio

import pytest

from isthmus_shared.engines.batching import MAX_FAILURES_IN_A_ROW, BatchingEngine, EngineState
from isthmus_shared.engines.config import EngineConfig, EngineKind
from isthmus_shared.engines.kv_memory import MemoryKvSource
from isthmus_shared.engines.reports import MAX_REPORTS
from isthmus_shared.engines.runner_port import StepResult, WorkResult
from isthmus_shared.engines.sequence import Batch
from isthmus_shared.engines.sim import SimRunner
from isthmus_shared.errors import EngineFailed, InvalidRequest
from isthmus_shared.ids import RequestId
from isthmus_shared.messages.work import FinishReason
from isthmus_testing import eventually
from isthmus_testing.engines import Harness, ask, prompt_of, running

CONFIG = EngineConfig(kind=EngineKind.SIM, model_name="m", kv_blocks=64)


class FlakyRunner(SimRunner):
    """Takes no time but says 0.25 s; raises in the steps that it is told to, and can be held."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.failing = 0
        self.error: Exception = RuntimeError("the device fell off")
        self.steps = 0
        self.stopped = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()

    async def execute(self, batch: Batch) -> StepResult:
        self.steps += 1
        self.entered.set()
        await self.gate.wait()
        await asyncio.sleep(0)
        if self.failing:
            self.failing -= 1
            raise self.error
        return StepResult([self._result(work) for work in batch.works], took_s=0.25)

    async def stop(self) -> None:
        self.stopped += 1


async def test_a_step_that_raises_fails_those_it_ran_and_the_engine_goes_on() -> None:
    runner = FlakyRunner()
    async with running(BatchingEngine(runner, CONFIG)) as engine:
        runner.failing = 1
        sink = engine.transfer(20)
        engine.submit(ask("a", prompt_of(20)))
        engine.submit(ask("b", prompt_of(20), save=sink))
        for name in ("a", "b"):
            outcome = await engine.until(name)
            assert outcome.finish is FinishReason.ERROR
            assert outcome.fault is not None
            assert outcome.fault.code == "engine_failed"
            assert "the device fell off" in outcome.fault.why
        assert sink.fault is not None
        engine.assert_empty()
        assert (await engine.run(ask("c", prompt_of(20)))).finish is FinishReason.LENGTH


async def test_what_a_failed_step_left_in_the_cache_is_nobodys_prefix() -> None:
    runner = FlakyRunner()
    async with running(BatchingEngine(runner, CONFIG)) as engine:
        await engine.run(ask("before", prompt_of(40)))
        assert (await engine.run(ask("again", prompt_of(40)))).cached == 32
        runner.failing = 1
        assert (await engine.run(ask("fails", prompt_of(50, seed=1)))).finish is FinishReason.ERROR
        assert (await engine.run(ask("after", prompt_of(50, seed=1)))).cached == 0
        assert (await engine.run(ask("doubt", prompt_of(40)))).cached == 0


async def test_a_sequence_that_fails_alone_leaves_nothing_for_others() -> None:
    class FaultyRunner(FlakyRunner):
        async def execute(self, batch: Batch) -> StepResult:
            step = await super().execute(batch)
            failed = WorkResult(fault=EngineFailed("this one").to_fault())
            results = [
                failed if work.sequence.request.request_id == "fails" else result
                for work, result in zip(batch.works, step.results, strict=True)
            ]
            return StepResult(results, step.took_s)

    async with running(BatchingEngine(FaultyRunner(), CONFIG)) as engine:
        await engine.run(ask("before", prompt_of(40)))
        assert (await engine.run(ask("fails", prompt_of(50, seed=1)))).finish is FinishReason.ERROR
        assert (await engine.run(ask("after", prompt_of(50, seed=1)))).cached == 0
        assert (await engine.run(ask("no doubt", prompt_of(40)))).cached == 32


async def test_what_is_cached_is_no_part_of_the_queue() -> None:
    runner = FlakyRunner()
    async with running(BatchingEngine(runner, CONFIG.model_copy(update={"max_batch": 1}))) as engine:
        await engine.run(ask("before", prompt_of(100)))
        runner.entered.clear()
        runner.gate.clear()
        engine.submit(ask("runs", prompt_of(20, seed=1)))
        await runner.entered.wait()
        engine.submit(ask("known", prompt_of(110)))
        engine.submit(ask("new", prompt_of(110), salt="s"))
        assert engine.engine.load().queued_prefill_tokens == 20 + (110 - 96) + 110
        runner.gate.set()
        for name in ("runs", "known", "new"):
            await engine.until(name)
        engine.assert_empty()


async def test_failures_that_repeat_mark_the_engine_failed_and_end_everybody() -> None:
    runner = FlakyRunner()
    engine = BatchingEngine(runner, CONFIG.model_copy(update={"max_batch": 1}))
    async with running(engine) as harness:
        runner.failing = MAX_FAILURES_IN_A_ROW
        source = harness.transfer(20)
        harness.submit(ask("loads", prompt_of(20), load=source))
        names = [harness.submit(ask(f"r{i}", prompt_of(20))) for i in range(5)]
        outcomes = [await harness.until(name) for name in [*names, "loads"]]
        assert all(outcome.finish is FinishReason.ERROR for outcome in outcomes)
        assert engine.state is EngineState.FAILED
        assert runner.steps == MAX_FAILURES_IN_A_ROW
        assert source.released
        harness.assert_empty()
        with pytest.raises(EngineFailed):
            engine.submit(ask("late", prompt_of(20)))


async def test_failures_with_success_between_do_not_add_up() -> None:
    runner = FlakyRunner()
    engine = BatchingEngine(runner, CONFIG)
    async with running(engine) as harness:
        for i in range(MAX_FAILURES_IN_A_ROW + 1):
            runner.failing = 1
            assert (await harness.run(ask(f"bad{i}", prompt_of(5)))).finish is FinishReason.ERROR
            assert (await harness.run(ask(f"good{i}", prompt_of(5)))).finish is FinishReason.LENGTH
        assert engine.state is EngineState.READY


async def test_blocks_stay_taken_until_the_step_that_writes_them_is_over() -> None:
    runner = FlakyRunner()
    async with running(BatchingEngine(runner, CONFIG)) as engine:
        runner.gate.clear()
        engine.submit(ask("r", prompt_of(20)))
        await runner.entered.wait()
        engine.engine.abort(RequestId("r"))
        assert engine.engine.load().kv_blocks_free < engine.info.kv_blocks_total
        runner.gate.set()
        assert (await engine.until("r")).finish is FinishReason.CANCELLED
        engine.assert_empty()


async def test_a_bug_in_a_step_ends_everybody_and_is_raised_by_stop() -> None:
    runner = FlakyRunner()
    runner.error = AssertionError("a bug")
    engine = BatchingEngine(runner, CONFIG)
    info = await engine.start()
    harness = Harness(engine, info)
    saving, loading = harness.transfer(20), harness.transfer(20)
    runner.failing = 1
    engine.submit(ask("loads", prompt_of(20), load=loading))
    engine.submit(ask("saves", prompt_of(20), save=saving))
    async with asyncio.timeout(10):
        await harness.collect()
    assert {name: outcome.finish for name, outcome in harness.outcomes.items()} == {
        "loads": FinishReason.ERROR,
        "saves": FinishReason.ERROR,
    }
    assert saving.fault is not None
    assert loading.released
    with pytest.raises(EngineFailed):
        engine.submit(ask("late", prompt_of(20)))
    with pytest.raises(ExceptionGroup, match="unhandled"):
        await engine.stop()


class BrokenSource(MemoryKvSource):
    async def ready(self) -> None:
        raise ConnectionResetError("the socket closed")


async def test_a_source_that_breaks_in_an_unforeseen_way_fails_its_sequence() -> None:
    async with running(BatchingEngine(FlakyRunner(), CONFIG)) as engine:
        transfer = engine.transfer(20)
        transfer.source = BrokenSource(transfer)
        outcome = await engine.run(ask("r", prompt_of(20), load=transfer))
        assert outcome.fault is not None
        assert outcome.fault.code == "transfer_failed"
        engine.assert_empty()


async def test_an_idle_engine_takes_no_steps() -> None:
    runner = FlakyRunner()
    async with running(BatchingEngine(runner, CONFIG)) as engine:
        await engine.run(ask("r", prompt_of(20), max_tokens=3))
        taken = runner.steps
        for _ in range(50):
            await asyncio.sleep(0)
        assert runner.steps == taken == 3


async def test_a_worker_that_does_not_read_pauses_the_steps_and_loses_nothing() -> None:
    runner = FlakyRunner()
    engine = BatchingEngine(runner, CONFIG)
    await engine.start()
    engine.submit(ask("r", prompt_of(5), max_tokens=MAX_REPORTS + 100))
    for _ in range(MAX_REPORTS * 4):
        await asyncio.sleep(0)
    assert runner.steps == MAX_REPORTS + 1
    indexes = []
    async with asyncio.timeout(10):
        async for report in engine.steps():
            indexes += [output.output_index for output in report.outputs]
            if report.outputs[0].finish is not None:
                break
    assert indexes == list(range(MAX_REPORTS + 100))
    await engine.stop()
    assert runner.stopped == 1


async def test_a_first_token_that_is_the_last_gives_no_other_though_the_loop_was_held_up() -> None:
    engine = BatchingEngine(FlakyRunner(), CONFIG)
    harness = Harness(engine, await engine.start())
    aside, saved = harness.transfer(5), harness.transfer(5)
    engine.submit(ask("fills", prompt_of(5), max_tokens=MAX_REPORTS))  # as many reports as the queue holds
    engine.submit(ask("aside", prompt_of(5), load=aside))
    engine.submit(ask("loads", prompt_of(5), load=saved, max_tokens=1))
    await eventually(lambda: (engine.load().running, engine.load().waiting) == (0, 0))
    engine.abort(RequestId("aside"))
    saved.sink.filled(0, saved.total_bytes)
    saved.sink.seal()
    for _ in range(10):
        await asyncio.sleep(0)  # the loop waits for room to report the abort
    engine.start_decode(RequestId("loads"), 40)
    async with asyncio.TaskGroup() as group:
        group.create_task(harness.collect())
        loads = await harness.until("loads")
        assert (loads.finish, loads.tokens) == (FinishReason.LENGTH, [])
        await engine.stop()


async def test_stop_returns_though_nobody_reads() -> None:
    engine = BatchingEngine(FlakyRunner(), CONFIG)
    await engine.start()
    engine.submit(ask("r", prompt_of(5), max_tokens=MAX_REPORTS + 100))
    for _ in range(MAX_REPORTS * 4):
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await engine.stop()
    last = [report async for report in engine.steps()][-1]
    assert last.outputs[-1].finish is FinishReason.CANCELLED
    engine.check_invariants()


async def test_an_id_that_is_here_already_is_refused() -> None:
    async with running(BatchingEngine(FlakyRunner(), CONFIG)) as engine:
        engine.submit(ask("r", prompt_of(5)))
        with pytest.raises(InvalidRequest, match="here already"):
            engine.submit(ask("r", prompt_of(5)))
        assert (await engine.until("r")).finish is FinishReason.LENGTH


async def test_a_first_token_outside_the_vocabulary_is_an_error_of_its_sequence() -> None:
    async with running(BatchingEngine(FlakyRunner(), CONFIG)) as engine:
        source = engine.transfer(5)
        engine.submit(ask("r", prompt_of(5), load=source))
        engine.engine.start_decode(RequestId("r"), 2**40)
        outcome = await engine.until("r")
        assert outcome.fault is not None
        assert outcome.fault.param == "first_token_id"
        assert source.released


async def test_load_tells_what_waits_runs_and_how_fast() -> None:
    runner = FlakyRunner()
    async with running(BatchingEngine(runner, CONFIG.model_copy(update={"max_batch": 1}))) as engine:
        assert engine.engine.load().decode_step_s is None
        runner.gate.clear()
        engine.submit(ask("runs", prompt_of(20), max_tokens=3))
        await runner.entered.wait()
        engine.submit(ask("waits", prompt_of(30, seed=1)))
        engine.submit(ask("loads", prompt_of(40), load=engine.transfer(40)))
        load = engine.engine.load()
        assert (load.running, load.waiting, load.loading) == (1, 1, 1)
        assert load.queued_prefill_tokens == 50
        assert load.kv_blocks_free == 62
        runner.gate.set()
        await engine.until("waits")
        after = engine.engine.load()
        assert after.decode_step_s == pytest.approx(0.25)
        assert after.prefill_tokens_per_s == pytest.approx((20 + 30) / (2 * 0.25))
