"""Chunks on their way out of a verbs lane, and the fence that tells a receiver when a flow's writes are over."""

from __future__ import annotations

from isthmus_kvrelay.core.events import FlowKey, LaneId, SendChunk, SlotUse
from isthmus_kvrelay.transports.verbs.outbox import Outbox
from isthmus_shared.ids import Generation, TransferId

A, B = FlowKey(TransferId("a"), Generation(1)), FlowKey(TransferId("b"), Generation(1))


def chunk(key: FlowKey, number: int) -> SendChunk:
    return SendChunk(LaneId(2), key, number, 0, 10, SlotUse(number, 1), SlotUse(number, 1))


class Seen:
    def __init__(self) -> None:
        self.dropped: list[SendChunk] = []
        self.fenced: list[FlowKey] = []
        self.outbox = Outbox(dropped=self.dropped.append, fenced=self.fenced.append)


def test_a_fence_waits_for_what_is_posted_and_drops_what_is_not() -> None:
    seen = Seen()
    for number in range(3):
        seen.outbox.put(chunk(A, number))
    posted = seen.outbox.take(2)
    seen.outbox.put(chunk(B, 0))
    seen.outbox.fence(A)
    assert seen.dropped == [chunk(A, 2)]
    assert seen.fenced == []
    seen.outbox.finished(posted[:1])
    assert seen.fenced == []
    seen.outbox.finished(posted[1:])
    assert seen.fenced == [A]
    assert seen.outbox.take(9) == [chunk(B, 0)]


def test_a_fence_of_a_flow_with_nothing_posted_is_answered_at_once_and_only_once() -> None:
    seen = Seen()
    seen.outbox.fence(A)
    assert seen.fenced == [A]
    seen.outbox.put(chunk(B, 0))
    seen.outbox.finished(seen.outbox.take(1))
    assert seen.fenced == [A]


def test_what_the_core_still_sends_of_a_fenced_flow_never_goes_out() -> None:
    seen = Seen()
    seen.outbox.fence(A)
    seen.outbox.put(chunk(A, 7))
    assert seen.dropped == [chunk(A, 7)]
    assert not len(seen.outbox)


def test_chunks_of_a_dead_rail_go_first_and_in_order_on_another() -> None:
    seen = Seen()
    for number in range(4):
        seen.outbox.put(chunk(A, number))
    seen.outbox.again(seen.outbox.take(3))
    assert [job.chunk for job in seen.outbox.take(9)] == [0, 1, 2, 3]


def test_chunks_of_a_dead_rail_whose_flow_was_fenced_meanwhile_are_dropped_and_the_fence_is_answered() -> None:
    seen = Seen()
    seen.outbox.put(chunk(A, 0))
    posted = seen.outbox.take(1)
    seen.outbox.fence(A)
    seen.outbox.again(posted)
    assert seen.dropped == [chunk(A, 0)]
    assert seen.fenced == [A]
    assert not len(seen.outbox)
