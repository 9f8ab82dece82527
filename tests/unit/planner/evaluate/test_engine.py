"""A simulated engine: by runs of steps as by single steps, and nothing lost."""

from __future__ import annotations

import random

import pytest

from isthmus_planner.evaluate.engine import NEVER, Engine, EngineSpec, Sequence
from isthmus_planner.sim.hardware import DecodeTable, PrefillTable

PREFILL = PrefillTable(base_s=0.01, token_s=2e-5, pair_s=1e-9, floor_s=0.002, extra_token_s=1e-6)
DECODE = DecodeTable(tuple(0.005 + 1e-4 * batch for batch in range(1, 33)), 1e-8)
SPEC = EngineSpec(PREFILL, DECODE, kv_capacity_tokens=20_000, chunk_tokens=512, interference=0.8)


def drive(engine: Engine, coming: list[tuple[float, Sequence]]) -> dict[int, tuple[float, float]]:
    """(first token, end) by number."""
    first: dict[int, float] = {}
    ended: dict[int, tuple[float, float]] = {}
    waiting = sorted(coming, key=lambda one: one[0])
    while waiting or engine.wake_s is not NEVER:
        if waiting and waiting[0][0] < engine.wake_s:
            at_s, sequence = waiting.pop(0)
            engine.submit(sequence, at_s)
            continue
        now_s = engine.wake_s
        effects = engine.advance(now_s)
        engine.check_invariants()
        first |= {sequence.number: now_s for sequence in effects.first}
        for sequence in (*effects.finished, *effects.prefilled):
            ended[sequence.number] = (first.get(sequence.number, now_s), now_s)
    return ended


def test_a_lone_request_takes_what_the_laws_say() -> None:
    engine = Engine(SPEC)
    ended = drive(engine, [(1.0, Sequence(0, isl_tokens=1000, osl_tokens=11))])
    prefill_s = sum(
        max(PREFILL.floor_s, n * 2e-5 + 1e-9 * n * (before + n / 2)) + n * 1e-6 for n, before in ((512, 0), (488, 512))
    )
    assert ended[0][0] == pytest.approx(1.0 + prefill_s)
    steps_s = sum(DECODE.step_s(1, 1000 + step) for step in range(10))
    assert ended[0][1] == pytest.approx(1.0 + prefill_s + steps_s)
    assert engine.idle


def test_a_run_of_steps_that_is_looked_at_or_cut_is_the_same_as_one_that_is_not() -> None:
    plain = drive(Engine(SPEC), [(0.0, Sequence(0, 100, 400))])
    engine = Engine(SPEC)
    engine.submit(Sequence(0, 100, 400), 0.0)
    engine.advance(engine.wake_s)
    for tick in range(1, 50):
        now_s = 0.01 + tick * 0.037
        while engine.wake_s <= now_s:
            engine.advance(engine.wake_s)
        load = engine.load(now_s)
        assert load.steps_total >= 1
        engine.slow_down(1.0, now_s)  # cuts the run at the next step, and changes nothing
    ended_s = 0.0
    while engine.wake_s is not NEVER:
        ended_s = engine.wake_s
        engine.advance(ended_s)
    assert ended_s == pytest.approx(plain[0][1], rel=1e-9)


def test_steps_that_a_heartbeat_tells_are_those_of_the_law() -> None:
    engine = Engine(SPEC)
    for number in range(4):
        engine.submit(Sequence(number, 500, 300, loaded=True), 0.0)
    engine.advance(engine.wake_s)  # the first one did not wait for the others
    load = engine.load(0.2)
    assert load.running == 4
    assert len(load.steps) == 8
    for step in load.steps:
        context = step.kv_tokens - step.decode_sequences
        assert step.step_s == pytest.approx(DECODE.step_s(4, context), rel=1e-9)
    assert engine.load(0.3).steps_total > load.steps_total


@pytest.mark.parametrize("seed", range(4))
def test_everything_ends_and_leaves_nothing_behind_even_where_memory_is_short(seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(EngineSpec(PREFILL, DECODE, kv_capacity_tokens=3_000, chunk_tokens=256))
    coming = [
        (
            rng.uniform(0, 5),
            Sequence(number, rng.randint(1, 900), rng.randint(1, 900), rng.random() < 0.2, rng.random() < 0.2),
        )
        for number in range(120)
    ]
    for _, sequence in coming:
        if sequence.prefill_only:
            sequence.loaded = False
    ended = drive(engine, coming)
    assert len(ended) == 120
    assert engine.idle
    assert engine.preemptions > 0
    assert engine.load(1e6).kv_blocks_free == 3_000 // 16


def test_a_slower_engine_takes_that_much_longer() -> None:
    def end_s(factor: float) -> float:
        engine = Engine(SPEC)
        engine.slow_down(factor, 0.0)
        return drive(engine, [(0.0, Sequence(0, 200, 50))])[0][1]

    assert end_s(2.0) == pytest.approx(2 * end_s(1.0))
