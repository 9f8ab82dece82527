from __future__ import annotations

import pytest

from isthmus_kvrelay.core.events import FlowKey, Side, SlotUse
from isthmus_kvrelay.core.staging import Pin, SlotState, Staging
from isthmus_testing.relay_world import flow

A, B, C = flow("a", 1), flow("b", 1), flow("c", 1)


def admitted(pool: Staging) -> dict[FlowKey, tuple[SlotUse, ...]]:
    return {key: slots for _, key, slots in pool.admit()}


def test_a_reservation_is_all_or_nothing_and_first_come_first_served() -> None:
    pool = Staging(total_slots=8, out_limit=4)
    for key, slots in ((A, 3), (B, 2), (C, 1)):
        pool.queue(Side.OUT, key, slots)
    taken = admitted(pool)
    assert list(taken) == [A]  # B does not fit, and C waits behind B
    for ref in taken[A]:
        pool.give_back(ref)
    assert list(admitted(pool)) == [B, C]
    pool.check_invariants()


def test_leaving_the_line_lets_the_next_one_in() -> None:
    pool = Staging(total_slots=4, out_limit=2)
    pool.queue(Side.OUT, A, 1)
    pool.queue(Side.OUT, B, 2)
    pool.queue(Side.OUT, C, 1)
    assert list(admitted(pool)) == [A]
    pool.leave_queue(Side.OUT, B)
    assert list(admitted(pool)) == [C]


def test_outgoing_flows_never_take_the_incoming_ones_share() -> None:
    pool = Staging(total_slots=8, out_limit=4)
    pool.queue(Side.OUT, A, 4)
    pool.queue(Side.OUT, B, 1)
    pool.queue(Side.IN, C, 4)
    assert set(admitted(pool)) == {A, C}


def test_incoming_flows_borrow_the_out_share_only_while_nobody_waits_for_it() -> None:
    pool = Staging(total_slots=8, out_limit=4)
    pool.queue(Side.IN, A, 4)
    assert list(admitted(pool)) == [A]
    pool.queue(Side.IN, B, 3)
    assert list(admitted(pool)) == [B]
    pool.queue(Side.OUT, C, 4)
    pool.queue(Side.IN, flow("d", 1), 1)
    assert not admitted(pool)


def test_a_slot_that_somebody_may_still_touch_is_not_reused() -> None:
    pool = Staging(total_slots=2, out_limit=1)
    pool.queue(Side.OUT, A, 1)
    (ref,) = admitted(pool)[A]
    pool.pin(ref, Pin.SEND)
    pool.give_back(ref)
    assert pool.state(ref) is SlotState.QUARANTINED
    pool.queue(Side.OUT, B, 1)
    assert not admitted(pool)
    assert pool.unpin(ref, Pin.SEND)
    (again,) = admitted(pool)[B]
    assert again == SlotUse(ref.slot, ref.use + 1)
    pool.check_invariants()


def test_a_late_or_repeated_unpin_changes_nothing() -> None:
    pool = Staging(total_slots=2, out_limit=1)
    pool.queue(Side.IN, A, 1)
    (ref,) = admitted(pool)[A]
    pool.give_back(ref)
    pool.queue(Side.IN, B, 1)
    (again,) = admitted(pool)[B]
    pool.pin(again, Pin.RECEIVE)
    assert not pool.unpin(ref, Pin.RECEIVE)
    assert not pool.unpin(SlotUse(99, 1), Pin.RECEIVE)
    assert pool.unpin(again, Pin.RECEIVE)
    assert not pool.unpin(again, Pin.RECEIVE)


def test_giving_back_twice_is_a_bug() -> None:
    pool = Staging(total_slots=2, out_limit=1)
    pool.queue(Side.OUT, A, 1)
    (ref,) = admitted(pool)[A]
    pool.give_back(ref)
    with pytest.raises(AssertionError):
        pool.give_back(ref)


@pytest.mark.parametrize("to", [SlotState.SENDING, SlotState.READY, SlotState.FREE])
def test_a_transition_that_is_not_in_the_table_is_a_bug(to: SlotState) -> None:
    pool = Staging(total_slots=2, out_limit=1)
    pool.queue(Side.OUT, A, 1)
    (ref,) = admitted(pool)[A]
    with pytest.raises(AssertionError):
        pool.move(ref, to)
