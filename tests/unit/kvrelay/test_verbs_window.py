"""Work-request credits of a rail: never more posted than both ends have room for, and what a dead rail had landed."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from isthmus_kvrelay.core.events import FlowKey, LaneId, SendChunk, SlotUse
from isthmus_kvrelay.transports.verbs.binding import Depths
from isthmus_kvrelay.transports.verbs.window import SIGNAL_EVERY, SPARE_WRITES, ReceiveCount, SendWindow
from isthmus_shared.ids import Generation, TransferId

KEY = FlowKey(TransferId("t"), Generation(1))


def chunk(number: int) -> SendChunk:
    return SendChunk(LaneId(2), KEY, number, number * 10, 10, SlotUse(number, 1), SlotUse(number, 1))


def chunks(first: int, count: int) -> list[SendChunk]:
    return [chunk(number) for number in range(first, first + count)]


def test_a_chunk_takes_two_places_of_the_send_queue_and_some_stay_spare() -> None:
    window = SendWindow(Depths(send=2 * 5 + SPARE_WRITES, receive=64), peer_receives=64)
    assert window.room == 5
    window.post(chunks(0, 5))
    assert window.room == 0
    window.completed(2)
    assert window.room == 3


def test_no_more_is_posted_than_the_peer_has_receives_even_when_all_has_completed() -> None:
    window = SendWindow(Depths(send=130, receive=64), peer_receives=4)
    window.post(chunks(0, 4))
    window.completed(3)
    assert window.room == 0
    window.peer_posted(6)
    window.peer_posted(5)
    assert window.room == 2


def test_the_last_chunk_of_a_chain_and_each_eighth_are_signalled() -> None:
    window = SendWindow(Depths(send=130, receive=64), peer_receives=64)
    signalled = [posted.number for posted, signal in window.post(chunks(0, SIGNAL_EVERY + 3)) if signal]
    assert signalled == [SIGNAL_EVERY - 1, SIGNAL_EVERY + 2]


def test_a_completion_stands_for_all_before_it() -> None:
    window = SendWindow(Depths(send=130, receive=64), peer_receives=64)
    window.post(chunks(0, 6))
    assert [job.chunk for job in window.completed(3)] == [0, 1, 2, 3]
    assert window.completed(3) == []
    assert (window.in_flight, window.in_flight_bytes) == (2, 20)


def test_when_a_rail_dies_the_peers_count_splits_what_was_on_it() -> None:
    window = SendWindow(Depths(send=130, receive=64), peer_receives=64)
    window.post(chunks(0, 6))
    window.completed(0)
    landed, again = window.peer_landed(4)
    assert [job.chunk for job in landed] == [1, 2, 3]
    assert [job.chunk for job in again] == [4, 5]
    assert window.in_flight == 0


def test_receives_are_told_a_quarter_of_the_queue_at_a_time() -> None:
    receives = ReceiveCount(16)
    receives.landing(3)
    assert receives.to_tell() is None
    receives.landing(1)
    assert receives.to_tell() == 20
    assert receives.to_tell() is None
    assert receives.landed == 4


class Pair(RuleBasedStateMachine):
    """A sender and a receiver over a wire that delivers in order, with completions and words that lag."""

    def __init__(self) -> None:
        super().__init__()
        self.window = SendWindow(Depths(send=16, receive=8), peer_receives=8)
        self.receives = ReceiveCount(8)
        self.on_wire: list[int] = []
        self.free_receives = 8
        self.to_complete: list[int] = []
        self.words: list[int] = []
        self.next = 0

    @precondition(lambda self: self.window.room)
    @rule(data=st.data())
    def post(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.window.room))
        for posted, signalled in self.window.post(chunks(self.next, count)):
            self.on_wire.append(posted.number)
            if signalled:
                self.to_complete.append(posted.number)
        self.next += count

    @precondition(lambda self: self.on_wire)
    @rule()
    def land(self) -> None:
        assert self.free_receives, "receiver not ready"
        self.free_receives -= 1
        self.on_wire.pop(0)

    @precondition(lambda self: self.free_receives < 8)
    @rule()
    def receiver_wakes(self) -> None:
        self.receives.landing(8 - self.free_receives)
        self.free_receives = 8
        told = self.receives.to_tell()
        if told is not None:
            self.words.append(told)

    @precondition(lambda self: self.words)
    @rule()
    def word_arrives(self) -> None:
        self.window.peer_posted(self.words.pop(0))

    @precondition(lambda self: self.to_complete)
    @rule()
    def completion(self) -> None:
        if not self.on_wire or self.to_complete[0] < self.on_wire[0]:
            self.window.completed(self.to_complete.pop(0))

    @invariant()
    def sound(self) -> None:
        self.window.check_invariants()

    @invariant()
    def never_stuck(self) -> None:
        """With nothing under way anywhere, there is room."""
        if not (self.on_wire or self.to_complete or self.words) and self.free_receives == 8:
            assert self.window.room


TestPair = Pair.TestCase
