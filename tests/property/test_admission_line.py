"""The line: fair between tenants, and nobody starves, whatever comes in whatever order."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_planner.admission.line import AGED_EVERY, AGED_S, MAX_PASSED, Entry, Line

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
COST = st.floats(1, 5_000)


def entry(number: int, tenant: str, cost: float, *, priority: int = 0, since_s: float = 0.0) -> Entry:
    return Entry(f"r{number}", tenant, priority, cost, since_s, until_s=1e9)


def first(line: Line, now_s: float) -> Entry:
    return line.went(next(line.next(now_s)).key, now_s)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abc"), st.lists(COST, min_size=30, max_size=30), min_size=2),
    st.randoms(use_true_random=False),
)
def test_two_tenants_that_always_wait_differ_by_at_most_one_entry_of_each(costs: dict[str, list[float]], rng) -> None:  # type: ignore[no-untyped-def]
    line = Line(WEIGHTS)
    order = [(tenant, cost) for tenant, each in costs.items() for cost in each]
    rng.shuffle(order)
    for number, (tenant, cost) in enumerate(order):
        line.add(entry(number, tenant, cost))
    waiting = dict.fromkeys(costs, 30)
    served: dict[str, float] = defaultdict(float)
    while all(waiting.values()):
        line.check_invariants()
        gone = first(line, 0.0)
        waiting[gone.tenant] -= 1
        served[gone.tenant] += gone.cost / WEIGHTS[gone.tenant]
        largest = {tenant: max(each) / WEIGHTS[tenant] for tenant, each in costs.items()}
        for one in costs:
            for other in costs:
                assert served[one] - served[other] <= largest[one] + largest[other] + 1e-6


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 3), COST), min_size=1, max_size=60))
def test_whoever_has_aged_goes_within_a_bound_that_newcomers_do_not_move(
    others: list[tuple[str, int, float]],
) -> None:
    line = Line(WEIGHTS)
    line.add(entry(0, "a", 100.0, priority=-100, since_s=0.0))
    went = []
    for number, (tenant, priority, cost) in enumerate(others, 1):
        line.add(entry(number, tenant, cost, priority=priority, since_s=1.0))
    now_s, number = AGED_S, len(others)
    while "r0" not in went:
        number += 1
        line.add(entry(number, "b", 1.0, priority=100, since_s=now_s))  # somebody more urgent comes every time
        went.append(first(line, now_s).key)
        line.check_invariants()
    assert len(went) <= AGED_EVERY


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 100), st.integers(-5, 5))
def test_one_that_does_not_fit_is_passed_so_often_and_no_more(passers: int, priority: int) -> None:
    line = Line()
    line.add(entry(0, "a", 1.0, priority=priority))
    passed = 0
    for number in range(1, passers + 1):
        line.add(entry(number, "b", 1.0, priority=priority, since_s=float(number)))
        tried = [each.key for each in line.next(0.0)]
        assert tried[0] == "r0"
        if len(tried) == 1:
            break
        line.went(tried[1], 0.0)
        passed += 1
    assert passed == min(passers, MAX_PASSED)


@given(st.lists(st.tuples(st.sampled_from("abc"), COST), max_size=40), st.lists(st.integers(0, 39), max_size=40))
def test_what_leaves_leaves_nothing_behind(entries: list[tuple[str, float]], leaving: list[int]) -> None:
    line = Line(WEIGHTS)
    for number, (tenant, cost) in enumerate(entries):
        line.add(entry(number, tenant, cost, priority=number % 3))
    for number in leaving:
        line.remove(f"r{number}")
        line.check_invariants()
    for number in range(len(entries)):
        line.remove(f"r{number}")
    line.check_invariants()
    assert len(line) == 0
    assert not list(line.next(0.0))


def test_higher_priority_goes_first_and_a_moved_one_before_its_tenants_others() -> None:
    line = Line()
    line.add(entry(1, "a", 10.0))
    line.add(entry(2, "a", 10.0))
    line.add(entry(3, "a", 10.0, priority=1))
    line.add(entry(4, "a", 10.0, since_s=-3.0), moved=True)
    assert [first(line, 0.0).key for _ in range(4)] == ["r3", "r4", "r1", "r2"]
