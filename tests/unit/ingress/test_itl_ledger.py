"""Which cause a late token gets. Each case differs from a steady stream in one thing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_ingress.itl_ledger import Cause, Excursion, ItlLedger
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.work import StepFacts
from isthmus_shared.metrics import ITL_CAUSES

STEP_S, HOST_S = 0.018, 0.002
ITL_S = STEP_S + HOST_S
ONE, TWO = Incarnation("one"), Incarnation("two")


@dataclass
class Stream:
    """A worker whose every step takes `STEP_S`, and the ingress that hears of it."""

    target_s: float = 0.0
    now_s: float = 100.0
    worker_s: float = 7.0
    number: int = 0
    ledger: ItlLedger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = ItlLedger(target_s=self.target_s)

    def token(
        self,
        *,
        step_s: float = STEP_S,
        outside_s: float = HOST_S,
        bus_s: float = 0.0,
        steps: int = 1,
        tokens: int = 1,
        worker: Incarnation = ONE,
        told: bool = True,
        **facts: Any,
    ) -> Excursion | None:
        """The next one: its step took so long, and so much passed outside the step and on the bus."""
        self.number += steps
        self.worker_s += step_s + outside_s
        self.now_s += step_s + outside_s + bus_s
        given = {"decode_sequences": 4, "prefill_tokens": 0} | facts
        step = StepFacts(number=self.number, ended_s=self.worker_s, step_s=step_s, **given)
        return self.ledger.take(self.now_s, tokens, worker, step if told else None)

    def steady(self, count: int = 20) -> Stream:
        for _ in range(count):
            assert self.token() is None
        return self


@pytest.mark.parametrize(
    ("cause", "late"),
    [
        (Cause.STEP, {"step_s": 0.1}),
        (Cause.BATCH, {"step_s": 0.1, "prefill_tokens": 512}),
        (Cause.BATCH, {"step_s": 0.1, "decode_sequences": 9}),
        (Cause.STEP, {"step_s": 0.1, "decode_sequences": 3}),
        (Cause.TRANSFER, {"step_s": 0.1, "kv_loads": 2}),
        (Cause.TRANSFER, {"step_s": 0.1, "kv_loads": 2, "decode_sequences": 9}),
        (Cause.TRANSFER, {"outside_s": 0.1, "kv_loads": 1}),
        (Cause.HOST, {"outside_s": 0.1}),
        (Cause.HEADROOM, {"outside_s": 0.1, "steps": 6}),
        (Cause.BUS, {"bus_s": 0.1}),
        (Cause.BUS, {"bus_s": 0.1, "step_s": 0.03, "prefill_tokens": 64}),
        (Cause.BATCH, {"bus_s": 0.03, "step_s": 0.1, "prefill_tokens": 64}),
        (Cause.HANDOVER, {"bus_s": 0.1, "worker": TWO}),
        (Cause.UNKNOWN, {"step_s": 0.1, "told": False}),
    ],
)
def test_the_largest_part_of_the_excess_names_the_cause(cause: Cause, late: dict[str, Any]) -> None:
    stream = Stream().steady()
    excursion = stream.token(**late)
    assert excursion is not None
    assert excursion.cause is cause
    assert excursion.median_s == pytest.approx(ITL_S)
    assert excursion.itl_s > 2 * ITL_S


def test_what_is_no_more_than_twice_the_median_is_none() -> None:
    stream = Stream().steady()
    assert stream.token(bus_s=0.9 * ITL_S) is None
    assert stream.token(bus_s=1.1 * ITL_S) is not None


def test_several_tokens_at_once_share_their_gap() -> None:
    stream = Stream().steady()
    assert stream.token(step_s=4 * STEP_S, tokens=4) is None
    assert stream.token(step_s=0.1, tokens=2) is not None


def test_before_there_is_a_median_only_a_target_makes_an_excursion() -> None:
    without, with_target = Stream(), Stream(target_s=0.05)
    for stream in (without, with_target):
        stream.token()
    assert without.token(step_s=0.3) is None
    late = with_target.token(step_s=0.3)
    assert late is not None
    assert (late.cause, late.median_s) == (Cause.STEP, 0)


def test_a_stream_that_is_always_above_its_target_says_why_each_time() -> None:
    stream = Stream(target_s=0.015)
    stream.token()
    assert [late.cause for _ in range(40) if (late := stream.token(step_s=0.04)) is not None] == [Cause.STEP] * 40


def test_milliseconds_of_a_fast_stream_are_the_clocks_and_no_excursion() -> None:
    stream = Stream()
    for _ in range(20):
        stream.token(step_s=0.0005, outside_s=0.0005)
    assert stream.token(step_s=0.0005, outside_s=0.0005, bus_s=0.004) is None


def test_the_median_follows_a_load_that_stays() -> None:
    stream = Stream().steady()
    late = [stream.token(step_s=0.1) for _ in range(60)]
    assert late[0] is not None
    assert late[-20:] == [None] * 20


def test_hand_overs_say_nothing_of_what_is_usual() -> None:
    stream = Stream()
    for number in range(40):
        assert stream.token(worker=(ONE, TWO)[number % 2]) is None
    assert stream.token(bus_s=1.0, worker=TWO) is None, "no median yet"


def test_every_cause_has_its_series() -> None:
    assert {cause.value for cause in Cause} == set(ITL_CAUSES)


GAPS = st.lists(st.tuples(st.floats(0.0, 0.2), st.integers(0, 40)), max_size=12)


@given(GAPS, st.sampled_from([0.0, 0.01]))
def test_takes_of_one_moment_may_be_told_at_once(takes: list[tuple[float, int]], target_s: float) -> None:
    """Each: so long after the one before, and so many more of that moment."""
    single, together, at_s, number = ItlLedger(target_s=target_s), ItlLedger(target_s=target_s), 0.0, 0

    def step() -> StepFacts:
        return StepFacts(
            number=number, ended_s=at_s, step_s=0.01, decode_sequences=number % 5, prefill_tokens=0, kv_loads=number % 2
        )

    for gap_s, more in takes:
        at_s, number = at_s + gap_s, number + 1
        assert single.take(at_s, 1, ONE, step()) == together.take(at_s, 1, ONE, step())
        for _ in range(more):
            number += 1
            assert single.take(at_s, 1, ONE, step()) is None
        together.more_at_once(more, step())
