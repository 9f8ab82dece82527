"""The staging pool: slots of one size, reserved all at once per flow, in order of arrival.

    FREE ─▶ FILLING ─▶ HELD ◀─▶ SENDING          an out-flow's slot
                       HELD ◀─▶ RETAINED         its flow is over, but another destination may ask for it
    FREE ─▶ LANDING ─▶ READY                     an in-flow's slot
    any but FREE ─▶ FREE, or ─▶ QUARANTINED ─▶ FREE while somebody may still touch it

Who may touch a slot's bytes holds a pin on it (the producer's engine, a send, a receive, the consumer's engine). A
slot that its flow gives back is free at once without pins, and else stays quarantined until the last pin goes: a slot
is reused after a fence, never after a timeout alone.

Shares: out-flows use at most `out_limit` slots, so that `in_limit` always remain for in-flows, which end without any
further reservation: two nodes that send to each other cannot starve each other. In-flows may borrow the out-share
while no out-flow waits for it.

Retained flows use what nobody needs: within a budget, least recently wanted first out, and gone the moment a
reservation needs their slots.

Progress: a flow gets all of its slots or none, in order of arrival, so one that holds slots never waits for more, and
the one at the head of the line gets its slots once those before it have ended.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from enum import StrEnum

from isthmus_kvrelay.core.names import FlowKey, Side, SlotUse


class SlotState(StrEnum):
    FREE = "free"
    FILLING = "filling"
    HELD = "held"
    SENDING = "sending"
    LANDING = "landing"
    READY = "ready"
    RETAINED = "retained"
    QUARANTINED = "quarantined"


class Pin(StrEnum):
    PRODUCER = "producer"
    SEND = "send"
    RECEIVE = "receive"
    SENDER = "sender"
    """The peer has credit for it, and has not yet said that it will not use it."""
    CONSUMER = "consumer"


_NEXT: dict[SlotState, frozenset[SlotState]] = {
    SlotState.FILLING: frozenset({SlotState.HELD}),
    SlotState.HELD: frozenset({SlotState.SENDING, SlotState.RETAINED}),
    SlotState.SENDING: frozenset({SlotState.HELD, SlotState.RETAINED}),
    SlotState.RETAINED: frozenset({SlotState.HELD}),
    SlotState.LANDING: frozenset({SlotState.READY}),
}
_FIRST = {Side.OUT: SlotState.FILLING, Side.IN: SlotState.LANDING}


class Staging:
    def __init__(self, *, total_slots: int, out_limit: int, retain_limit: int = 0) -> None:
        assert 0 < out_limit < total_slots, "both directions need at least one slot"
        assert 0 <= retain_limit <= out_limit
        self.total_slots = total_slots
        self.limit = {Side.OUT: out_limit, Side.IN: total_slots - out_limit}
        self.used = {Side.OUT: 0, Side.IN: 0}
        self.quarantines = 0
        """Slots put into quarantine since the start."""
        self.retain_limit = retain_limit
        self.retained: OrderedDict[FlowKey, tuple[SlotUse, ...]] = OrderedDict()
        """Least recently wanted first."""
        self.evicted: list[FlowKey] = []
        """Retained flows that had to go; who keeps more about them empties this."""
        self._retained_slots = 0
        self._free = list(range(total_slots))
        """A heap: the lowest come first, so that a flow's slots mostly lie side by side."""
        self._state = [SlotState.FREE] * total_slots
        self._use = [0] * total_slots
        self._side: list[Side | None] = [None] * total_slots
        self._pins: list[dict[Pin, int]] = [{} for _ in range(total_slots)]
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
        """Evicts retained flows if that is what it takes."""
        if self._would_fit(side, slots, spare=0):
            return True
        spare = [key for key, kept in self.retained.items() if not any(self._pins[ref.slot] for ref in kept)]
        if not self._would_fit(side, slots, spare=sum(len(self.retained[key]) for key in spare)):
            return False
        for key in spare:
            self.evict(key)
            if self._would_fit(side, slots, spare=0):
                break
        return True

    def _would_fit(self, side: Side, slots: int, *, spare: int) -> bool:
        if slots > len(self._free) + spare:
            return False
        if side is Side.OUT:
            return self.used[side] - spare + slots <= self.limit[side]
        return self.used[side] + slots <= self.limit[side] or not self._queue[Side.OUT]

    def _take(self, side: Side) -> SlotUse:
        slot = heapq.heappop(self._free)
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
        """Several consumers on this node may read one slot; of the others each is the only one of its kind."""
        assert self.is_current(ref)
        pins = self._pins[ref.slot]
        assert pin not in pins or pin is Pin.CONSUMER
        assert self._state[ref.slot] not in (SlotState.FREE, SlotState.QUARANTINED)
        pins[pin] = pins.get(pin, 0) + 1

    def unpin(self, ref: SlotUse, pin: Pin) -> bool:
        """Whether that pin was held; a late or repeated report of it is False and changes nothing."""
        if not self.is_current(ref) or pin not in self._pins[ref.slot]:
            return False
        pins = self._pins[ref.slot]
        pins[pin] -= 1
        if not pins[pin]:
            del pins[pin]
        if not pins and self._state[ref.slot] is SlotState.QUARANTINED:
            self._to_free(ref.slot)
        self._moved = self._moved or self._state[ref.slot] is SlotState.RETAINED
        return True

    def pinned(self, ref: SlotUse, pin: Pin) -> bool:
        return self.is_current(ref) and pin in self._pins[ref.slot]

    def give_back(self, ref: SlotUse) -> None:
        """The flow is over: free now, or quarantined until the last pin goes."""
        assert self.is_current(ref)
        assert self._state[ref.slot] not in (SlotState.FREE, SlotState.QUARANTINED), "freed twice"
        if self._pins[ref.slot]:
            self._state[ref.slot] = SlotState.QUARANTINED
            self.quarantines += 1
        else:
            self._to_free(ref.slot)

    # --- retained flows

    def retain(self, key: FlowKey, slots: tuple[SlotUse, ...]) -> bool:
        """Keep what that flow held, if the budget allows; else False, and nothing has changed."""
        if len(slots) > self.retain_limit:
            return False
        while self._retained_slots + len(slots) > self.retain_limit:
            self.evict(next(iter(self.retained)))
        for ref in slots:
            self.move(ref, SlotState.RETAINED)
        self.retained[key] = slots
        self._retained_slots += len(slots)
        self._moved = True  # somebody in line may need them
        return True

    def wanted_again(self, key: FlowKey) -> tuple[SlotUse, ...]:
        """Back to a flow."""
        slots = self.retained.pop(key)
        self._retained_slots -= len(slots)
        for ref in slots:
            self.move(ref, SlotState.HELD)
        return slots

    def evict(self, key: FlowKey) -> None:
        slots = self.retained.pop(key)
        self._retained_slots -= len(slots)
        for ref in slots:
            self.give_back(ref)
        self.evicted.append(key)

    def _to_free(self, slot: int) -> None:
        side = self._side[slot]
        assert side is not None
        self._state[slot], self._side[slot] = SlotState.FREE, None
        self.used[side] -= 1
        heapq.heappush(self._free, slot)
        self._moved = True

    # --- the whole

    def by_state(self) -> dict[SlotState, int]:
        count = dict.fromkeys(SlotState, 0)
        for state in self._state:
            count[state] += 1
        return count

    def live_slots(self) -> set[int]:
        """Slots that a flow owns: neither free nor quarantined nor retained."""
        idle = (SlotState.FREE, SlotState.QUARANTINED, SlotState.RETAINED)
        return {slot for slot, state in enumerate(self._state) if state not in idle}

    def check_invariants(self) -> None:
        free, used = [], dict.fromkeys(Side, 0)
        for slot, (state, side, pins) in enumerate(zip(self._state, self._side, self._pins, strict=True)):
            if state is SlotState.FREE:
                assert side is None
                assert not pins
                free.append(slot)
                continue
            assert side is not None
            used[side] += 1
            assert state is not SlotState.QUARANTINED or pins
            assert state is not SlotState.SENDING or Pin.SEND in pins
            assert not pins or min(pins.values()) > 0
        assert sorted(self._free) == free
        assert self.used == used
        assert used[Side.OUT] <= self.limit[Side.OUT]
        kept = [ref for slots in self.retained.values() for ref in slots]
        assert len(kept) == self._retained_slots <= self.retain_limit
        assert {ref.slot for ref in kept} == {s for s, state in enumerate(self._state) if state is SlotState.RETAINED}
        self._check_progress()

    def _check_progress(self) -> None:
        """Nobody waits for what could be given now, and the head of each line will be served when others have ended."""
        for side in Side:
            head = next(iter(self._queue[side].items()), None)
            if head is None or self._moved:
                continue
            assert head[1] <= self.limit[side], "it could never be served"
            assert not self._would_fit(side, head[1], spare=0), "the head of the line waits for nothing"
            held = sum(1 for state in self._state if state is not SlotState.FREE)
            assert held > 0, "the head of the line waits for nobody"
