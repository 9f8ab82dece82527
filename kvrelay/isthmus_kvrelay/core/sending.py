"""Chunks on their way out: handed to the lanes in order and at their rates, until each transport has let go of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from isthmus_kvrelay.core.effects import SendChunk, SendQuiet
from isthmus_kvrelay.core.events import ChunkSent, RevokeReceived
from isthmus_kvrelay.core.flow import OutFlow
from isthmus_kvrelay.core.ledger import LANE_WINDOW_CHUNKS, Lane, Ledger
from isthmus_kvrelay.core.names import FlowKey, LaneId, SlotUse
from isthmus_kvrelay.core.staging import Pin, SlotState

Pull = tuple[LaneId, FlowKey, int]
"""One attempt of one consumer's relay to fetch a flow."""


@dataclass(frozen=True, slots=True)
class _Send:
    pull: Pull
    chunk: int
    via: str


class Sending:
    def __init__(self, ledger: Ledger, flows: dict[FlowKey, OutFlow]) -> None:
        self._ledger, self._flows = ledger, flows
        self._sends: dict[SlotUse, _Send] = {}
        """What the transports have: at most one send per slot, `LANE_WINDOW_CHUNKS` per lane."""
        self._moving: Counter[Pull] = Counter()
        """How many of `_sends` each pull has."""
        self._revoked: set[Pull] = set()
        """Pulls whose receiver waits to hear that nothing moves any more."""

    def offer(self, flow: OutFlow) -> None:
        """It may have something to send."""
        lane = self._ledger.lanes.get(flow.lane) if flow.lane is not None else None
        if lane is not None and flow.sendable:
            if not len(lane.order):
                lane.waiting_since_s = self._ledger.now_s
            lane.order.offer(flow.source, deadline_s=flow.deadline_s, opened_s=flow.opened_s, key=flow.key)

    def withdraw(self, flow: OutFlow) -> None:
        lane = self._ledger.lanes.get(flow.lane) if flow.lane is not None else None
        if lane is not None:
            lane.order.withdraw(flow.key)

    def leaving(self, slots: tuple[SlotUse, ...]) -> set[int]:
        """Which chunks of these slots the transports still have."""
        return {chunk for chunk, ref in enumerate(slots) if ref in self._sends}

    def pump(self) -> None:
        """Hand chunks to the transports: those that are filled and credited, in order, at each lane's rate."""
        for lane in self._ledger.lanes.values():
            while lane.in_transport < LANE_WINDOW_CHUNKS and self._send_one(lane):
                pass

    def _send_one(self, lane: Lane) -> bool:
        led = self._ledger
        chosen = lane.order.peek()
        if chosen is None:
            return False
        flow = self._flows[chosen.key]
        size = flow.size_of(flow.sendable[0])
        ready_s = lane.pacer.ready_at_s(size, now_s=led.now_s)
        if ready_s > led.now_s:
            if lane.wake_s <= led.now_s or ready_s < lane.wake_s:
                lane.wake_s = ready_s
                led.wake_at(ready_s)
            return False
        lane.pacer.spend(size, now_s=led.now_s)
        lane.order.served(chosen.source, size)
        lane.in_transport += 1
        grant = flow.spend_credit()
        if not flow.sendable:
            lane.order.withdraw(flow.key)
        chunk, ref = grant.chunk, flow.slots[grant.chunk]
        led.count.queue_s.append(led.now_s - flow.filled_s.pop(chunk))
        led.staging.pin(ref, Pin.SEND)
        led.staging.move(ref, SlotState.SENDING)
        pull = (lane.lane, flow.key, flow.pull)
        self._sends[ref] = _Send(pull, chunk, lane.via)
        self._moving[pull] += 1
        led.emit(SendChunk(lane.lane, flow.key, chunk, chunk * flow.chunk_bytes, size, ref, grant.into))
        return True

    def sent(self, event: ChunkSent) -> None:
        led = self._ledger
        lane = led.lanes.get(event.lane)
        send = self._sends.pop(event.out_of, None)
        if send is None or not led.staging.unpin(event.out_of, Pin.SEND):
            led.count.stale += 1
            return
        if lane is not None:
            lane.in_transport -= 1
        self._one_less(send.pull)
        flow = self._flows.get(event.key)
        if flow is None or not led.staging.is_current(event.out_of) or flow.slots[event.chunk] != event.out_of:
            return
        if event.ok:
            led.count.sent_bytes += flow.size_of(event.chunk)
            led.count.sent_via[send.via] += flow.size_of(event.chunk)
            if lane is not None:
                lane.sent_bytes += flow.size_of(event.chunk)
        if led.staging.state(event.out_of) is SlotState.SENDING:
            led.staging.move(event.out_of, SlotState.HELD)
        if event.chunk in flow.leaving:
            flow.has_left(event.chunk, led.now_s)
            self.offer(flow)
        elif event.chunk in flow.sending:
            flow.sending.remove(event.chunk)
            flow.sent.add(event.chunk)  # when not ok the lane is lost, and its LaneDown ends the pull

    def _one_less(self, pull: Pull) -> None:
        self._moving[pull] -= 1
        if not self._moving[pull]:
            del self._moving[pull]
            self._be_quiet(pull)

    def revoked(self, event: RevokeReceived) -> None:
        """Answer, at once or when the last chunk of that pull has left. The pull itself has been ended."""
        pull = (event.lane, event.key, event.pull)
        self._revoked.add(pull)
        if not self._moving[pull]:
            del self._moving[pull]
            self._be_quiet(pull)

    def _be_quiet(self, pull: Pull) -> None:
        if pull in self._revoked:
            self._revoked.remove(pull)
            if pull[0] in self._ledger.lanes:
                self._ledger.emit(SendQuiet(*pull))

    def lane_down(self, lane: LaneId) -> None:
        self._revoked = {pull for pull in self._revoked if pull[0] != lane}

    def check_invariants(self) -> None:
        led = self._ledger
        moving = Counter(send.pull for send in self._sends.values())
        assert moving == self._moving, (moving, self._moving)
        assert self._revoked <= set(moving), "a pull is quiet and its receiver was not told"
        for ref in self._sends:
            assert led.staging.pinned(ref, Pin.SEND)
        for lane in led.lanes.values():
            assert lane.in_transport == sum(1 for s in self._sends.values() if s.pull[0] == lane.lane)
            ready = {flow.key for flow in self._flows.values() if flow.lane == lane.lane and flow.sendable}
            assert {key for key in self._flows if key in lane.order} == ready
            assert len(lane.order) == len(ready)
