from __future__ import annotations

from isthmus_kvrelay.transports.verbs.health import MAX_KNOWN, RailHealth
from isthmus_shared.ids import Incarnation

PEER, OTHER = Incarnation("peer"), Incarnation("other")


def test_each_failure_in_a_row_doubles_the_quarantine_up_to_its_bound() -> None:
    health = RailHealth(first_s=1, longest_s=5)
    assert [health.failed("rxe0", PEER, now_s=10) for _ in range(5)] == [1, 2, 4, 5, 5]
    assert health.left_s("rxe0", PEER, now_s=12) == 3
    assert health.left_s("rxe0", PEER, now_s=15) == 0


def test_a_device_is_in_quarantine_towards_one_peer_only() -> None:
    health = RailHealth()
    health.failed("rxe0", PEER, now_s=0)
    assert health.left_s("rxe0", PEER, now_s=0) > 0
    assert health.left_s("rxe0", OTHER, now_s=0) == 0
    assert health.left_s("rxe1", PEER, now_s=0) == 0


def test_after_bytes_have_crossed_the_next_failure_is_a_first_one() -> None:
    health = RailHealth(first_s=1, longest_s=60)
    health.failed("rxe0", PEER, now_s=0)
    health.failed("rxe0", PEER, now_s=0)
    health.worked("rxe0", PEER)
    assert health.left_s("rxe0", PEER, now_s=0) == 0
    assert health.failed("rxe0", PEER, now_s=0) == 1


def test_it_remembers_a_bounded_number_of_peers() -> None:
    health = RailHealth()
    for number in range(MAX_KNOWN + 10):
        health.failed("rxe0", Incarnation(f"peer-{number}"), now_s=number)
    assert len(health) == MAX_KNOWN
    assert health.left_s("rxe0", Incarnation("peer-0"), now_s=0) == 0
