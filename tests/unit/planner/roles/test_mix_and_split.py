"""What is measured of the load, and the division of workers that follows from it."""

from __future__ import annotations

import itertools
import random

import pytest

from isthmus_planner.roles.capacity import Ability, capacity, decode_batch, prefill_s, speeds
from isthmus_planner.roles.mix import HALF_LIFE_S, MAX_OPEN, WINDOW_S, Kind, Mix, MixMeter
from isthmus_planner.roles.split import BOTH, DECODE, PREFILL, best_split, covers, current, divided_capacity, toward
from isthmus_shared.ids import RequestId, WorkerId
from isthmus_shared.messages.health import Role
from isthmus_testing.role_pool import ability


def mix(isl: int, osl: float, rate_per_s: float = 1.0) -> Mix:
    return Mix(rate_per_s, (Kind(isl, 0, osl, 1.0),))


# -- the mix


def ask(meter: MixMeter, number: int, now_s: float, isl: int = 100, allowed: int = 1000, **fields: float) -> None:
    meter.arrived(RequestId(f"r{number}"), "m", isl_tokens=isl, max_osl_tokens=allowed, now_s=now_s, **fields)


def test_the_rate_is_that_of_the_arrivals_from_the_first_seconds_on() -> None:
    meter = MixMeter()
    for number in range(400):
        ask(meter, number, number / 10)
        if number in (50, 399):
            measured = meter.mix("m", number / 10)
            assert measured is not None
            assert measured.rate_per_s == pytest.approx(10, rel=0.15)


def test_the_rate_is_right_where_there_are_more_arrivals_than_are_kept() -> None:
    meter = MixMeter()
    for number in range(30_000):
        ask(meter, number, number / 1000)
    measured = meter.mix("m", 30.0)
    assert measured is not None
    assert measured.rate_per_s == pytest.approx(1000, rel=0.1)


def test_a_mix_that_turns_is_half_turned_after_one_half_life_and_forgotten_after_the_window() -> None:
    meter = MixMeter()
    for number in range(600):
        ask(meter, number, number / 10, isl=8192)
    for number in range(100):
        ask(meter, 1000 + number, 60 + number / 10, isl=1024)
    measured = meter.mix("m", 60 + HALF_LIFE_S)
    assert measured is not None
    assert measured.isl_tokens == pytest.approx((8192 + 1024) / 2, rel=0.05)
    assert meter.mix("m", 70 + WINDOW_S + 1) is None


def test_answers_are_expected_to_use_the_share_of_their_allowance_that_such_ones_have_used() -> None:
    meter = MixMeter()
    for number in range(20):
        ask(meter, number, 0.0, allowed=32_000)
        meter.ended(RequestId(f"r{number}"), 320)
    ask(meter, 99, 1.0, allowed=32_000)
    open_ended = meter.mix("m", 1.0)
    assert open_ended is not None
    assert open_ended.osl_tokens == pytest.approx(320, rel=0.01)
    for number in range(100, 400):
        ask(meter, number, 100.0, allowed=1000)
        meter.ended(RequestId(f"r{number}"), 1000)
    known = meter.mix("m", 101.0)
    assert known is not None
    assert known.osl_tokens == pytest.approx(1000, rel=0.01), "another kind of client uses what it asks for"


def test_an_expectation_is_taken_over_the_mix_not_of_its_mean() -> None:
    half = Mix(1.0, (Kind(8192, 0, 10, 0.5), Kind(1024, 0, 8192, 0.5)))
    context = (10 * (8192 + 5) + 8192 * (1024 + 4096)) / (10 + 8192)
    assert half.context_tokens == pytest.approx(context)
    cached = Mix(1.0, (Kind(8192, 8000, 10, 1.0),))
    assert prefill_s(ability("w", Role.PREFILL), cached) == pytest.approx(0.006 + 192 * 200e-6)


def test_what_was_promised_to_a_tenth_counts() -> None:
    meter = MixMeter()
    for number in range(20):
        ask(meter, number, 0.0, **({"itl_s": 0.02} if number < 3 else {}))
    measured = meter.mix("m", 0.0)
    assert measured is not None
    assert measured.itl_s == 0.02
    for number in range(100):
        ask(meter, 100 + number, 0.0)
    measured = meter.mix("m", 0.0)
    assert measured is not None
    assert measured.itl_s is None


def test_the_meter_is_bounded() -> None:
    meter = MixMeter()
    for number in range(MAX_OPEN + 10):
        meter.arrived(RequestId(f"{number}"), f"m{number % 70}", isl_tokens=1, max_osl_tokens=1, now_s=0.0)
    meter.check_invariants()
    assert len(meter.models()) == 64


# -- capacity


def test_the_batch_is_the_largest_that_meets_the_target_and_fits() -> None:
    worker = ability("w", Role.DECODE)
    load = mix(1024, 1024)
    context = 1024 + 512
    batch = decode_batch(worker, load, 0.008)
    assert worker.costs.step_s(batch, batch * context) <= 0.008 < worker.costs.step_s(batch + 1, (batch + 1) * context)
    assert decode_batch(worker, load, None) == 64
    assert decode_batch(worker, mix(100_000, 1000), None) == 3
    assert decode_batch(worker, load, 0.001) == 1, "however slow"
    served = speeds(worker, load, 0.008)
    assert served.decode_per_s == pytest.approx(batch / (1024 * worker.costs.step_s(batch, batch * context)))


# -- the split


def all_splits(workers: list[Ability]) -> list[dict[WorkerId, frozenset[Role]]]:
    choices = [(PREFILL, DECODE) if w.flexible else (frozenset(w.roles),) for w in workers]
    named = [dict(zip([w.worker_id for w in workers], has, strict=True)) for has in itertools.product(*choices)]
    return [roles for roles in named if covers(roles)]


def test_no_division_is_better_than_the_one_that_is_found() -> None:
    """Comparative advantage gives the optimum of a divisible problem; what is left to whole ones is exchanged."""
    rng = random.Random(1)
    exact = 0
    for _ in range(60):
        workers = [
            ability(
                f"w{n}",
                rng.choice((Role.PREFILL, Role.DECODE)),
                prefill=rng.choice((1.0, 2.0, 5.0)),
                decode=rng.choice((1.0, 1.0, 2.0)),
            )
            for n in range(rng.randint(2, 7))
        ]
        load = mix(rng.choice((512, 1024, 8192)), rng.choice((128, 1024, 8192)))
        of_each = {w.worker_id: speeds(w, load, 0.02) for w in workers}
        found = capacity(of_each, best_split(workers, of_each)).per_s
        best = max(capacity(of_each, roles).per_s for roles in all_splits(workers))
        assert found >= 0.9 * best
        exact += found >= best - 1e-9
    assert exact >= 50


def test_what_workers_are_worth_together_is_at_least_what_whole_ones_do() -> None:
    rng = random.Random(2)
    for _ in range(60):
        workers = [
            ability(f"w{n}", Role.DECODE, prefill=rng.choice((1.0, 3.0)), decode=rng.choice((1.0, 2.0)))
            for n in range(rng.randint(1, 7))
        ]
        load = mix(rng.choice((512, 8192)), rng.choice((128, 1024, 8192)))
        of_each = {w.worker_id: speeds(w, load, 0.02) for w in workers}
        worth = divided_capacity(workers, of_each)
        whole = max((capacity(of_each, roles).per_s for roles in all_splits(workers)), default=0.0)
        assert worth >= whole - 1e-9
        one = max(of_each[w.worker_id].prefill_per_s for w in workers)
        assert worth <= whole + one
    alone = of_each[workers[0].worker_id]
    each_s = 1 / alone.prefill_per_s + 1 / alone.decode_per_s
    assert divided_capacity(workers[:1], of_each) == pytest.approx(1 / each_s), "one after the other"


def test_who_is_better_at_prefill_prefills_and_the_division_follows_the_mix() -> None:
    fast = [ability(f"fast{n}", Role.DECODE, prefill=6.0) for n in range(2)]
    plain = [ability(f"plain{n}", Role.PREFILL) for n in range(6)]
    counts = []
    for isl, osl in ((8192, 128), (8192, 1024), (1024, 1024), (1024, 8192)):
        of_each = {w.worker_id: speeds(w, mix(isl, osl), 0.02) for w in (*fast, *plain)}
        wanted = best_split([*fast, *plain], of_each)
        prefills = {name for name, has in wanted.items() if has == PREFILL}
        assert prefills & {"fast0", "fast1"} or len(prefills) == 0, "those who are best at it come first"
        counts.append(len(prefills))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] >= 1


def test_there_is_always_one_on_each_side() -> None:
    workers = [ability("a", Role.PREFILL), ability("b", Role.PREFILL)]
    of_each = {w.worker_id: speeds(w, mix(10, 100_000), None) for w in workers}
    assert set(best_split(workers, of_each).values()) == {PREFILL, DECODE}
    alone = [ability("a", Role.PREFILL)]
    assert best_split(alone, of_each) == {"a": BOTH}
    fixed = [ability("a", Role.DECODE, able=frozenset({Role.DECODE})), ability("b", Role.DECODE, able=frozenset())]
    assert best_split(fixed, of_each) == current(fixed)


def test_the_last_of_a_side_is_not_taken_away() -> None:
    workers = [ability("a", Role.PREFILL), ability("b", Role.DECODE)]
    of_each = {w.worker_id: speeds(w, mix(100, 100), None) for w in workers}
    swapped = {WorkerId("a"): DECODE, WorkerId("b"): PREFILL}
    assert toward(workers, of_each, swapped, frozenset({WorkerId("a"), WorkerId("b")})) is None


def test_the_single_change_that_brings_most_is_found_with_its_capacity() -> None:
    workers = [ability("a", Role.PREFILL), ability("b", Role.PREFILL), ability("c", Role.PREFILL, decode=3.0)]
    workers.append(ability("d", Role.DECODE))
    of_each = {w.worker_id: speeds(w, mix(256, 4096), None) for w in workers}
    wanted = {WorkerId("a"): PREFILL, WorkerId("b"): DECODE, WorkerId("c"): DECODE, WorkerId("d"): DECODE}
    found = toward(workers, of_each, wanted, frozenset(wanted))
    assert found is not None
    assert found[0] == "c"
    after = capacity(of_each, {**current(workers), WorkerId("c"): DECODE})
    assert (found[1].prefill_per_s, found[1].decode_per_s) == pytest.approx((after.prefill_per_s, after.decode_per_s))
