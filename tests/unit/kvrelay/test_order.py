from __future__ import annotations

from collections import Counter

from isthmus_kvrelay.core.order import AGE_LIMIT_S, FairOrder
from isthmus_testing.relay_world import flow


def take(order: FairOrder, size: int = 10) -> str:
    chosen = order.peek()
    assert chosen is not None
    order.served(chosen.source, size)
    return chosen.key.transfer_id


def offer(order: FairOrder, source: int, name: str, deadline_s: float, opened_s: float = 0.0) -> None:
    order.offer(source, deadline_s=deadline_s, opened_s=opened_s, key=flow(name, 1))


def test_the_earliest_deadline_goes_first_within_a_source() -> None:
    order = FairOrder()
    offer(order, 1, "late", 4.0)
    offer(order, 1, "soon", 3.0)
    assert take(order) == "soon"
    order.withdraw(flow("soon", 1))
    assert take(order) == "late"


def test_from_its_age_limit_on_nothing_that_came_later_goes_before_a_flow() -> None:
    order = FairOrder()
    offer(order, 1, "patient", 1e6, opened_s=0.0)
    for number in range(10):
        offer(order, 1, f"urgent{number}", AGE_LIMIT_S + number + 0.5, opened_s=AGE_LIMIT_S + number)
    assert take(order) == "patient"


def test_a_nearer_deadline_goes_before_one_that_has_not_aged_yet() -> None:
    order = FairOrder()
    offer(order, 1, "patient", 1e6, opened_s=0.0)
    offer(order, 1, "urgent", AGE_LIMIT_S - 1, opened_s=1.0)
    assert take(order) == "urgent"


def test_sources_share_by_bytes_whatever_their_deadlines() -> None:
    order = FairOrder()
    for i in range(10):
        offer(order, 1, f"g{i}", 1.0)
    offer(order, 2, "m", 100.0)
    served = Counter("g" if take(order).startswith("g") else "m" for _ in range(100))
    assert served == {"g": 50, "m": 50}


def test_a_source_saves_nothing_up_while_it_has_nothing_to_send() -> None:
    order = FairOrder()
    offer(order, 1, "a", 1.0)
    for _ in range(50):
        take(order)
    offer(order, 2, "b", 2.0)
    assert sorted(take(order) for _ in range(4)) == ["a", "a", "b", "b"]


def test_a_source_that_comes_and_goes_gains_nothing_by_it() -> None:
    order = FairOrder()
    offer(order, 2, "steady", 2.0)
    taken: Counter[str] = Counter()
    for _ in range(100):
        offer(order, 1, "now and then", 1.0)
        taken[take(order)] += 1
        order.withdraw(flow("now and then", 1))
    assert taken == {"steady": 50, "now and then": 50}


def test_a_source_that_cannot_go_is_passed_over() -> None:
    order = FairOrder()
    offer(order, 1, "a", 1.0)
    offer(order, 2, "b", 2.0)
    chosen = order.peek(without={1})
    assert chosen is not None
    assert chosen.key == flow("b", 1)
    assert order.peek(without={1, 2}) is None


def test_nobody_waiting_is_nobody() -> None:
    order = FairOrder()
    assert order.peek() is None
    offer(order, 1, "a", 1.0)
    order.withdraw(flow("a", 1))
    assert order.peek() is None
    assert len(order) == 0
