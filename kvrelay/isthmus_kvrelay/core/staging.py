"""The staging pool: slots of one size, reserved all at once per flow, in order of arrival.

    FREE ─▶ FILLING ─▶ HELD ◀─▶ SENDING          an out-flow's slot
    FREE ─▶ LANDING ─▶ READY                     an in-flow's slot
    any but FREE ─▶ FREE, or ─▶ QUARANTINED ─▶ FREE while somebody may still touch it

Who may touch a slot's bytes holds a pin on it (the producer's engine, a send, a receive, the consumer's engine). A
slot that its flow gives back is free at once without pins, and else stays quarantined until the last pin goes: a slot
is reused after a fence, never after a timeout alone.

Shares: out-flows use at most `out_limit` slots, so that `in_limit` always remain for in-flows, which end without any
further reservation: two nodes that send to each other cannot starve each other. In-flows may borrow the out-share
while no out-flow waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from isthmus_kvrelay.core.events import FlowKey, Side, SlotUse


class SlotState(StrEnum):
    FREE = "free"
    FILLING = "filling"
    HELD = "held"
    SENDING = "sending"
    LANDING = "landing"
    READY = "ready"
    QUARANTINED = "quarantined"


class Pin(StrEnum):
    PRODUCER = "producer"
    SEND = "send"
    RECEIVE = "receive"
    CONSUMER = "consumer"


_NEXT: dict[SlotState, frozenset[SlotState]] = {
    SlotState.FILLING: frozenset({SlotState.HELD}),
    SlotState.HELD: frozenset({SlotState.SENDING}),
    SlotState.SENDING: frozenset({SlotState.HELD}),
    SlotState.LANDING: frozenset({SlotState.READY}),
}
_FIRST = {Side.OUT: SlotState.FILLING, Side.IN: SlotState.LANDING}


class Staging:
    def __init__(self, *, total_slots: int, out_limit: int) -> None:
        assert 0 < out_limit < total_slots, "both directions need at least one slot"
        self.total_slots = total_slots
        self.limit = {Side.OUT: out_limit, Side.IN: total_slots - out_limit}
        self.used = {Side.OUT: 0, Side.IN: 0}
        self.quarantines = 0
        """Slots put into quarantine since the start."""
        self._free = list(range(total_slots - 1, -1, -1))
        self._state = [SlotState.FREE] * total_slots
        self._use = [0] * total_slots
        self._side: list[Side | None] = [None] * total_slots
        self._pins: list[set[Pin]] = [set() for _ in range(total_slots)]
        self._queue: dict[Side, dict[FlowKey, int]] = {Side.OUT: {}, Side.IN: {}}
        self._moved = False

    # --- reservations

    def queue(self, side: Side, key: FlowKey, slots: int) -> None:
        """Wait in line for `slots` slots; `admit` hands them out. The caller has checked `slots <= limit[side]`."""
        assert 0 < slots <= self.limit[side]
        assert key not in self._queue[side]
        self._queue[side][key] = slots
        self._moved = True

    def leave_queue(self, side: Side, key: FlowKey) -> None:
        if self._queue[side].pop(key, None) is not None:
            self._moved = True

    def queued(self, side: Side) -> int:
        return len(self._queue[side])

    def admit(self) -> Iterator[tuple[Side, FlowKey, tuple[SlotUse, ...]]]:
        """Reservations that can be met now, each side's in its order of arrival."""
        while self._moved:
            self._moved = False
            for side in (Side.IN, Side.OUT):
                head = next(iter(self._queue[side].items()), None)
                if head is not None and self._fits(side, head[1]):
                    key, slots = head
                    del self._queue[side][key]
                    self._moved = True
                    yield side, key, tuple(self._take(side) for _ in range(slots))

    def _fits(self, side: Side, slots: int) -> bool:
        if slots > len(self._free):
            return False
        if self.used[side] + slots <= self.limit[side]:
            return True
        return side is Side.IN and not self._queue[Side.OUT]

    def _take(self, side: Side) -> SlotUse:
        slot = self._free.pop()
        self._state[slot], self._side[slot] = _FIRST[side], side
        self._use[slot] += 1
        self.used[side] += 1
        return SlotUse(slot, self._use[slot])

    # --- one slot

    def is_current(self, ref: SlotUse) -> bool:
        return 0 <= ref.slot < self.total_slots and self._use[ref.slot] == ref.use

    def state(self, ref: SlotUse) -> SlotState:
        assert self.is_current(ref)
        return self._state[ref.slot]

    def move(self, ref: SlotUse, to: SlotState) -> None:
        assert self.is_current(ref)
        assert to in _NEXT[self._state[ref.slot]], (ref, self._state[ref.slot], to)
        self._state[ref.slot] = to

    def pin(self, ref: SlotUse, pin: Pin) -> None:
        assert self.is_current(ref)
        assert pin not in self._pins[ref.slot]
        assert self._state[ref.slot] not in (SlotState.FREE, SlotState.QUARANTINED)
        self._pins[ref.slot].add(pin)

    def unpin(self, ref: SlotUse, pin: Pin) -> bool:
        """Whether that pin was held; a late or repeated report of it is False and changes nothing."""
        if not self.is_current(ref) or pin not in self._pins[ref.slot]:
            return False
        self._pins[ref.slot].remove(pin)
        if self._state[ref.slot] is SlotState.QUARANTINED and not self._pins[ref.slot]:
            self._to_free(ref.slot)
        return True

    def give_back(self, ref: SlotUse) -> None:
        """The flow is over: free now, or quarantined until the last pin goes."""
        assert self.is_current(ref)
        assert self._state[ref.slot] not in (SlotState.FREE, SlotState.QUARANTINED), "freed twice"
        if self._pins[ref.slot]:
            self._state[ref.slot] = SlotState.QUARANTINED
            self.quarantines += 1
        else:
            self._to_free(ref.slot)

    def _to_free(self, slot: int) -> None:
        side = self._side[slot]
        assert side is not None
        self._state[slot], self._side[slot] = SlotState.FREE, None
        self.used[side] -= 1
        self._free.append(slot)
        self._moved = True

    # --- the whole

    def by_state(self) -> dict[SlotState, int]:
        count = dict.fromkeys(SlotState, 0)
        for state in self._state:
            count[state] += 1
        return count

    def live_slots(self) -> set[int]:
        """Slots that a flow owns: neither free nor quarantined."""
        idle = (SlotState.FREE, SlotState.QUARANTINED)
        return {slot for slot, state in enumerate(self._state) if state not in idle}

    def check_invariants(self) -> None:
        assert sorted(self._free) == [s for s, state in enumerate(self._state) if state is SlotState.FREE]
        for side in Side:
            assert self.used[side] == sum(1 for held in self._side if held is side)
        assert self.used[Side.OUT] <= self.limit[Side.OUT]
        for slot, state in enumerate(self._state):
            pins = self._pins[slot]
            assert (self._side[slot] is None) == (state is SlotState.FREE)
            assert state is not SlotState.FREE or not pins
            assert state is not SlotState.QUARANTINED or pins
            assert (state is SlotState.SENDING) <= (Pin.SEND in pins)
