"""When roles change and when not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus_planner.cost.online import StepCosts
from isthmus_planner.roles.balance import BalancePolicy, Balancer, Change, Why
from isthmus_planner.roles.capacity import Ability
from isthmus_planner.roles.mix import Kind, Mix
from isthmus_planner.roles.split import covers, current
from isthmus_shared.messages.health import Role
from isthmus_testing.role_pool import EITHER, ITL_S, LONG_IN, LONG_OUT, RolePool, Shape, ability, division

POLICY = BalancePolicy()
TURN_S = 120.0


def turning(now_s: float) -> Shape:
    return LONG_IN if now_s < TURN_S else LONG_OUT


def test_a_load_that_turns_is_followed_within_a_minute_one_worker_at_a_time() -> None:
    pool = RolePool(division(4, 4), 2.5, turning)
    pool.run(int(TURN_S))
    assert pool.share_of_best(LONG_IN) > 0.9
    assert pool.share_of_best(LONG_OUT) < 0.6, "or there would be nothing to follow"
    before = len(pool.asked)
    pool.run(60)
    assert pool.share_of_best(LONG_OUT) > 0.9
    changes = pool.asked[before:]
    assert len(changes) == len({change.worker_id for change in changes}), "each worker changed once"
    assert set(pool.outcomes) == {"kept"}
    settled = len(pool.asked)
    pool.run(600)
    assert len(pool.asked) == settled, "and there it stays"


@pytest.mark.parametrize("period_s", [6, 20, 40, 60, 90, 120])
def test_a_mix_that_oscillates_does_not_make_roles_flap(period_s: int) -> None:
    pool = RolePool(division(4, 4), 2.5, lambda now_s: LONG_IN if now_s % period_s < period_s / 2 else LONG_OUT)
    pool.run(1800)
    signs = [(change.at_s, 1 if Role.PREFILL in change.roles else -1) for change in pool.demanded]
    turns = [(b[0] - a[0], b[0]) for a, b in pairwise(signs) if a[1] != b[1]]
    assert all(gap_s >= POLICY.dwell_s for gap_s, _ in turns)
    assert len(turns) <= 5, "each alternation that comes too soon doubles the next one's wait"
    assert len(pool.demanded) <= 20
    by_worker: dict[str, float] = {}
    for change in pool.demanded:
        assert change.at_s - by_worker.get(change.worker_id, -POLICY.dwell_s) >= POLICY.dwell_s
        by_worker[change.worker_id] = change.at_s


def test_slow_changes_of_the_day_are_followed_every_time() -> None:
    period_s = 1200
    pool = RolePool(division(4, 4), 2.5, lambda now_s: LONG_IN if now_s % period_s < period_s / 2 else LONG_OUT)
    for _ in range(4):
        pool.run(period_s // 2 - 60)
        assert pool.share_of_best(pool.shape(pool.now_s)) > 0.9
        pool.run(60)


def test_little_load_changes_nothing() -> None:
    pool = RolePool(division(4, 4), 0.2, lambda _: LONG_OUT)
    pool.run(300)
    assert pool.asked == []


def test_a_wish_that_does_not_last_changes_nothing() -> None:
    balancer, workers = Balancer(POLICY), division(6, 2)
    out, into = (Mix(2.5, (Kind(isl, 0, osl, 1.0),)) for isl, osl in (LONG_OUT, LONG_IN))
    for second in range(300):
        lasting = second % 20 < POLICY.hold_s
        change = balancer.look(workers, out if lasting else into, ITL_S, float(second))
        assert change is None
    late = [balancer.look(workers, out, ITL_S, 300.0 + second) for second in range(int(POLICY.hold_s) + 1)]
    assert [change is None for change in late] == [True] * int(POLICY.hold_s) + [False]


def test_a_worker_that_is_bad_at_its_new_role_is_taken_back_and_left_alone() -> None:
    def learn(worker: Ability) -> Ability:
        slow = StepCosts(*(20 * cost for cost in (0.006, 30e-6, 50e-9)), worker.costs.per_prefill_token_s)
        return replace(worker, costs=slow) if worker.roles == (Role.DECODE,) else worker

    pool = RolePool(division(7, 1), 4.0, lambda _: LONG_OUT, learn=learn)
    pool.run(60)
    assert [change.why for change in pool.asked[:2]] == [Why.DEMAND, Why.BACK]
    assert pool.outcomes[0] == "taken back"
    first = pool.asked[0].worker_id
    again = [change for change in pool.demanded[1:] if change.worker_id == first]
    assert all(change.at_s >= pool.asked[0].at_s + POLICY.regret_s for change in again)


def test_one_that_does_not_obey_is_asked_again_and_then_left_alone() -> None:
    asked: list[Change] = []

    def obey(change: Change) -> bool:
        asked.append(change)
        return len({each.worker_id for each in asked}) > 1

    pool = RolePool(division(7, 1), 2.5, lambda _: LONG_OUT, obey=obey)
    pool.run(120)
    assert "not obeyed" in pool.outcomes
    stubborn = pool.asked[0]
    assert [change.worker_id for change in pool.asked].count(stubborn.worker_id) == 1
    assert pool.asked[1].at_s >= stubborn.at_s + POLICY.confirm_s


def test_the_change_is_asked_for_until_it_shows() -> None:
    pool = RolePool(division(7, 1), 2.5, lambda _: LONG_OUT, obey=lambda _: False)
    pool.run_until_asked()
    pool.run(3)
    assert len(pool.asked) == 1
    mix = None
    assert pool.balancer.look(pool.workers, mix, None, pool.now_s + 1) is pool.asked[0]


def test_a_worker_lost_in_the_middle_of_its_change_is_forgotten() -> None:
    pool = RolePool(division(7, 1), 2.5, lambda _: LONG_OUT, obey=lambda _: False)
    gone = pool.run_until_asked().worker_id
    pool.workers = [worker for worker in pool.workers if worker.worker_id != gone]
    pool.obey = lambda _: True
    pool.run(90)
    assert pool.outcomes[0] == "lost"
    assert pool.share_of_best(LONG_OUT) > 0.9


def test_a_side_that_nobody_is_left_on_is_filled_at_once() -> None:
    pool = RolePool(division(3, 0), 0.0, lambda _: LONG_IN)
    pool.run(int(POLICY.cover_s) + 3)
    assert [change.why for change in pool.asked] == [Why.COVERAGE]
    assert covers(current(pool.workers))


def test_a_side_is_not_filled_while_its_worker_only_starts_anew() -> None:
    pool = RolePool(division(3, 0), 0.0, lambda _: LONG_IN)
    pool.run(2)
    pool.workers = division(3, 1)
    pool.run(10)
    assert pool.asked == []


def test_workers_of_two_kinds_that_stand_the_wrong_way_round_are_exchanged() -> None:
    """No single change is one for the better here; two are."""
    workers = [ability("fast", Role.DECODE, prefill=8.0), ability("plain", Role.PREFILL, decode=4.0)]
    workers += [ability(f"d{n}", Role.DECODE, able=frozenset({Role.DECODE})) for n in range(2)]
    workers += [ability(f"p{n}", Role.PREFILL, able=frozenset({Role.PREFILL})) for n in range(2)]
    pool = RolePool(workers, 6.0, lambda _: (4096, 2048))
    before = pool.share_of_best((4096, 2048))
    pool.run(120)
    assert before < 0.8
    assert pool.share_of_best((4096, 2048)) > 0.95
    assert {change.worker_id for change in pool.demanded} == {"fast", "plain"}


def test_equal_workers_whose_costs_are_known_unequally_well_are_not_exchanged_for_each_other() -> None:
    """What is known of a worker that has not decoded yet looks better than what is known of one that does."""

    def learn(worker: Ability) -> Ability:
        costs = worker.costs
        slower = StepCosts(*(1.2 * each for each in (costs.base_s, costs.per_sequence_s, costs.per_kv_token_s)), 200e-6)
        return replace(worker, costs=slower) if worker.roles == (Role.DECODE,) else worker

    pool = RolePool(division(6, 2), 2.5, lambda _: LONG_OUT, learn=learn)
    pool.run(75)
    assert pool.prefills == 1
    assert all(Role.DECODE in change.roles for change in pool.demanded)
    pool.run(600)
    assert len(pool.demanded) == 5


def test_who_led_before_is_not_waited_for() -> None:
    pool = RolePool(division(7, 1), 2.5, lambda _: LONG_OUT, obey=lambda _: False)
    pool.run_until_asked()
    pool.balancer.forget_pending()
    assert pool.balancer.pending is None


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prefill=st.integers(0, 5),
    decode=st.integers(0, 5),
    rate_per_s=st.floats(0.1, 8.0),
    shapes=st.lists(st.tuples(st.integers(16, 16_000), st.integers(1, 8000)), min_size=1, max_size=6),
    lasts_s=st.integers(5, 90),
    fixed=st.integers(0, 3),
    deaf=st.booleans(),
)
def test_whatever_is_asked_for_no_side_is_emptied_and_no_worker_hurried(
    prefill: int,
    decode: int,
    rate_per_s: float,
    shapes: list[Shape],
    lasts_s: int,
    fixed: int,
    deaf: bool,
) -> None:
    workers = division(prefill, decode)
    workers = [replace(w, able=frozenset(w.roles)) if n < fixed else w for n, w in enumerate(workers)]
    pool = RolePool(
        workers,
        rate_per_s,
        lambda now_s: shapes[int(now_s / lasts_s) % len(shapes)],
        obey=lambda change: not (deaf and change.worker_id == "p0"),
    )
    pool.run(200)  # asserts in the pool: no side is ever emptied
    assert all(change.worker_id in {w.worker_id for w in workers if w.able == EITHER} for change in pool.asked)
    last: dict[str, float] = {}
    for change in pool.demanded:
        assert change.at_s - last.get(change.worker_id, -1e9) >= POLICY.dwell_s
        last[change.worker_id] = change.at_s
