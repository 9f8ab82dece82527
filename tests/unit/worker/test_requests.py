from __future__ import annotations

import pytest

from isthmus_shared.errors import Cancelled, NoCapacity, StaleParty
from isthmus_shared.ids import Generation, RequestId, TransferId
from isthmus_worker.requests import MAX_CANCELLED, MAX_REQUESTS, MAX_STAGED, Phase, Record, Requests


def record(request: str = "r", generation: int = 1, *, deadline_s: float | None = None, kv: bool = True) -> Record:
    return Record(
        request_id=RequestId(request),
        generation=Generation(generation),
        events_subject="events",
        deadline_at_s=deadline_s,
        transfer_id=TransferId(f"t-{request}") if kv else None,
    )


def test_a_newer_generation_replaces_the_older_and_hands_it_over_to_be_freed() -> None:
    requests = Requests()
    old, new = record(generation=1), record(generation=2)
    assert requests.admit(old) is None
    assert requests.admit(new) is old
    requests.check_invariants()
    assert not requests.holds(old)
    assert requests.by_engine_id(old.engine_id) is None
    assert requests.by_engine_id(new.engine_id) is new


@pytest.mark.parametrize("generation", [1, 2])
def test_an_older_or_equal_generation_is_refused_and_changes_nothing(generation: int) -> None:
    requests = Requests()
    held = record(generation=2)
    requests.admit(held)
    with pytest.raises(StaleParty):
        requests.admit(record(generation=generation))
    assert requests.holds(held)


def test_a_cancel_that_comes_before_its_submit_wins() -> None:
    requests = Requests()
    assert requests.cancel(RequestId("r"), Generation(2)) is None
    for generation in (1, 2):
        with pytest.raises(Cancelled):
            requests.admit(record(generation=generation))
    assert requests.admit(record(generation=3)) is None
    requests.check_invariants()


def test_a_cancel_that_comes_while_the_submit_waits_leaves_nothing_to_hold() -> None:
    requests = Requests()
    opening = record()
    requests.admit(opening)
    assert requests.cancel(RequestId("r"), Generation(1)) is opening
    assert not requests.holds(opening)
    assert requests.end(opening) is None, "a record ends once"


def test_a_cancel_of_an_older_generation_leaves_the_newer_one_alone() -> None:
    requests = Requests()
    held = record(generation=3)
    requests.admit(held)
    assert requests.cancel(RequestId("r"), Generation(2)) is None
    assert requests.holds(held)


def test_cancels_remembered_are_bounded_and_the_oldest_goes_first() -> None:
    requests = Requests()
    for number in range(MAX_CANCELLED + 1):
        requests.cancel(RequestId(f"r{number}"), Generation(1))
    requests.check_invariants()
    requests.admit(record("r0"))
    with pytest.raises(Cancelled):
        requests.admit(record("r1"))


def test_records_are_bounded() -> None:
    requests = Requests()
    for number in range(MAX_REQUESTS):
        requests.admit(record(f"r{number}"))
    with pytest.raises(NoCapacity):
        requests.admit(record("one-more"))
    assert requests.admit(record("r0", 2)) is not None, "a replacement takes no more room"


def test_deadlines_bind_until_the_sequence_streams() -> None:
    requests = Requests()
    early, late, free = record("a", deadline_s=1.0), record("b", deadline_s=2.0), record("c", kv=False)
    for each in (early, late, free):
        requests.admit(each)
    assert requests.next_deadline_s() == 1.0
    assert requests.due(0.9) == []
    assert requests.due(1.0) == [early]
    assert requests.due(1.0) == [], "a late one is told once"
    late.phase = Phase.STREAMING
    assert requests.due(5.0) == []
    assert requests.next_deadline_s() is None


def test_staged_kv_is_held_no_longer_than_its_deadline() -> None:
    requests = Requests()
    held = record(deadline_s=2.0)
    requests.admit(held)
    requests.stage(held)
    assert requests.due(1.9) == []
    assert requests.due(2.0) == [held]


def test_the_deadline_of_a_replaced_attempt_no_longer_binds() -> None:
    requests = Requests()
    requests.admit(record(generation=1, deadline_s=1.0))
    newer = record(generation=2, deadline_s=3.0)
    requests.admit(newer)
    assert requests.next_deadline_s() == 3.0
    assert requests.due(2.0) == []
    assert requests.due(3.0) == [newer]


def test_losing_the_relay_loses_what_is_crossing_and_nothing_else() -> None:
    requests = Requests()
    crossing, streaming, alone = record("a"), record("b"), record("c", kv=False)
    for each in (crossing, streaming, alone):
        requests.admit(each)
        each.phase = Phase.ACTIVE
    streaming.phase = Phase.STREAMING
    assert requests.needing_relay() == [crossing]


def test_staged_kv_is_not_unfinished_work() -> None:
    requests = Requests()
    held = record()
    requests.admit(held)
    assert requests.unfinished == 1
    requests.stage(held)
    requests.check_invariants()
    assert requests.unfinished == 0
    assert requests.by_engine_id(held.engine_id) is None
    assert requests.find(held.request_id, held.generation) is held
    assert requests.cancel(held.request_id, held.generation) is held
    assert len(requests) == 0


def test_staged_kv_takes_no_room_from_new_requests_and_is_bounded_itself() -> None:
    requests = Requests()
    for number in range(MAX_STAGED + 1):
        held = record(f"r{number}")
        requests.admit(held)
        requests.stage(held)
    requests.check_invariants()
    assert requests.find(RequestId("r0"), Generation(1)) is None, "the oldest is forgotten"
    assert requests.find(RequestId("r1"), Generation(1)) is not None


def test_a_newer_generation_replaces_staged_kv_too() -> None:
    requests = Requests()
    staged = record(generation=1)
    requests.admit(staged)
    requests.stage(staged)
    with pytest.raises(StaleParty):
        requests.admit(record(generation=1))
    assert requests.admit(record(generation=2)) is staged
    requests.check_invariants()
