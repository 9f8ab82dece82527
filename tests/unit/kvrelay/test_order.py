from __future__ import annotations

from collections import Counter

from isthmus_kvrelay.core.order import Candidate, FairOrder
from isthmus_testing.relay_world import flow


def test_the_earliest_deadline_goes_first_within_a_source() -> None:
    order = FairOrder()
    late, soon = Candidate(1, 9.0, flow("a", 1)), Candidate(1, 3.0, flow("b", 1))
    assert order.pick([late, soon]) == soon


def test_sources_share_by_bytes_whatever_their_deadlines() -> None:
    order = FairOrder()
    greedy = [Candidate(1, 1.0, flow(f"g{i}", 1)) for i in range(10)]
    modest = Candidate(2, 100.0, flow("m", 1))
    served: Counter[int] = Counter()
    for _ in range(100):
        chosen = order.pick([*greedy, modest])
        assert chosen is not None
        order.served(chosen.source, 10)
        served[chosen.source] += 1
    assert served == {1: 50, 2: 50}


def test_a_source_saves_nothing_up_while_it_has_nothing_to_send() -> None:
    order = FairOrder()
    one, two = Candidate(1, 1.0, flow("a", 1)), Candidate(2, 2.0, flow("b", 1))
    for _ in range(50):
        assert order.pick([one]) == one
        order.served(1, 10)
    turns = []
    for _ in range(4):
        chosen = order.pick([one, two])
        assert chosen is not None
        order.served(chosen.source, 10)
        turns.append(chosen.source)
    assert sorted(turns) == [1, 1, 2, 2]


def test_nobody_waiting_is_nobody() -> None:
    assert FairOrder().pick([]) is None
