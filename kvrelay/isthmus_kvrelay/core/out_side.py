"""The sending side: sinks of this node's producers, pulled by consumers over lanes or on this node."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus_kvrelay.core.events import (
    AbortByClient,
    AbortReceived,
    ChunkSent,
    ChunksFilled,
    ClientId,
    CloseClient,
    CloseLane,
    CreditReceived,
    DoneReceived,
    FlowKey,
    LaneId,
    OpenSink,
    PullReceived,
    SealSink,
    SendAbort,
    SendChunk,
    SendOpened,
    Side,
    SinkEnded,
    SinkOpened,
    SlotUse,
)
from isthmus_kvrelay.core.flow import OutFlow, OutInput, OutState, chunk_count
from isthmus_kvrelay.core.ledger import LANE_WINDOW_CHUNKS, MAX_FLOWS, Lane, Ledger
from isthmus_kvrelay.core.order import Candidate
from isthmus_kvrelay.core.staging import Pin, SlotState
from isthmus_shared.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    IsthmusError,
    NoCapacity,
    PartyLost,
    ProtocolViolation,
    StagingFull,
    StaleParty,
)


class OutSide:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.flows: dict[FlowKey, OutFlow] = {}

    # --- producer

    def open(self, event: OpenSink) -> None:
        led = self._ledger
        slots = chunk_count(event.total_bytes, led.settings.slot_bytes)
        refusal = self._refusal(event, slots)
        if refusal is not None:
            led.emit(SinkEnded(event.client, event.key, refusal.to_fault()))
            return
        for older in [flow for flow in self.flows.values() if flow.key.transfer_id == event.key.transfer_id]:
            self.fail(older, StaleParty(f"generation {older.key.generation} of the transfer was superseded"))
        flow = OutFlow(
            key=event.key,
            owner=event.client,
            source=event.client,
            total_bytes=event.total_bytes,
            chunk_bytes=led.settings.slot_bytes,
            manifest=event.manifest,
            deadline_s=led.now_s + event.deadline_s,
            wait_until_s=led.now_s + event.wait_s,
            opened_s=led.now_s,
        )
        self.flows[flow.key] = flow
        led.staging.queue(Side.OUT, flow.key, slots)
        led.wake_at(flow.deadline_s)
        led.wake_at(flow.wait_until_s)

    def _refusal(self, event: OpenSink, slots: int) -> IsthmusError | None:
        led = self._ledger
        if led.draining:
            return Draining("the relay is going away", todo="prefill elsewhere")
        if event.total_bytes <= 0:
            return InvalidRequest(f"a transfer of {event.total_bytes} bytes", param="total_bytes")
        if slots > led.settings.out_limit:
            return InvalidRequest(
                f"a transfer of {event.total_bytes} bytes can never be staged here",
                why=f"outgoing transfers may use {led.settings.out_limit * led.settings.slot_bytes} bytes",
                todo="raise ISTHMUS_RELAY_POOL_BYTES or ISTHMUS_RELAY_OUT_SHARE",
                param="total_bytes",
            )
        if len(self.flows) >= MAX_FLOWS:
            return NoCapacity(f"the relay has {MAX_FLOWS} outgoing transfers open")
        if not led.fence(Side.OUT, event.key):
            return StaleParty(f"generation {event.key.generation} of the transfer is not newer than one seen before")
        return None

    def reserved(self, key: FlowKey, slots: tuple[SlotUse, ...]) -> None:
        flow = self.flows[key]
        assert flow.owner is not None
        flow.slots = slots
        flow.advance(OutInput.RESERVED)
        self._ledger.hold(flow.owner, Pin.PRODUCER, key, slots)
        self._ledger.emit(SinkOpened(flow.owner, key, tuple(ref.slot for ref in slots), flow.chunk_bytes))
        if flow.lane is not None:
            self._answer_pull(flow)

    def filled(self, event: ChunksFilled) -> None:
        flow = self.flows.get(event.key)
        if flow is None or flow.owner != event.client:
            self._ledger.count.stale += 1
            return
        fresh = set(event.chunks)
        valid = flow.state is OutState.FILLING and len(fresh) == len(event.chunks) and not fresh & flow.filled
        if not valid or not all(0 <= chunk < len(flow.slots) for chunk in fresh):
            fault = ProtocolViolation("chunks filled twice, out of range or before the sink was open").to_fault()
            self._ledger.emit(CloseClient(event.client, fault))
            return
        for chunk in fresh:
            flow.fill(chunk)
            self._ledger.staging.move(flow.slots[chunk], SlotState.HELD)
            self._ledger.let_go(event.client, Pin.PRODUCER, event.key, flow.slots[chunk])

    def seal(self, event: SealSink) -> None:
        flow = self.flows.get(event.key)
        if flow is None or flow.owner != event.client or flow.state is OutState.SEALED:
            return  # over already: delivered before its seal was read, or aborted
        if not flow.all_filled:
            fault = ProtocolViolation("a sink was sealed before all of it was filled").to_fault()
            self._ledger.emit(CloseClient(event.client, fault))
            return
        flow.advance(OutInput.SEAL)

    def abort_by_client(self, event: AbortByClient) -> None:
        flow = self.flows.get(event.key)
        if flow is not None and flow.owner == event.client:
            self.fail(flow, event.fault.to_error())

    def client_down(self, client: ClientId) -> None:
        for flow in [flow for flow in self.flows.values() if flow.owner == client]:
            if flow.state is OutState.SEALED:
                flow.owner = None
            else:
                self.fail(flow, PartyLost("the producer of the transfer died before it was sealed"))

    # --- consumer's relay

    def pull(self, event: PullReceived) -> None:
        flow = self.flows.get(event.key)
        if flow is None or flow.taken:
            if flow is not None and flow.lane == event.lane:
                self._ledger.count.stale += 1
                return
            fault = self._ledger.reason(Side.OUT, event.key) or StaleParty("no such transfer waits here").to_fault()
            self._ledger.emit(SendAbort(event.lane, event.key, fault))
            return
        flow.lane = event.lane
        if flow.state is not OutState.QUEUED:
            self._answer_pull(flow)

    def _answer_pull(self, flow: OutFlow) -> None:
        assert flow.lane is not None
        self._ledger.emit(SendOpened(flow.lane, flow.key, flow.total_bytes, flow.chunk_bytes, flow.manifest))

    def credit(self, event: CreditReceived) -> None:
        flow = self.flows.get(event.key)
        if flow is None or flow.lane != event.lane:
            self._ledger.count.stale += 1
            return
        for grant in event.grants:
            known = grant.chunk in flow.credits or grant.chunk in flow.sending or grant.chunk in flow.sent
            if not 0 <= grant.chunk < len(flow.slots):
                fault = ProtocolViolation("credit for a chunk that does not exist").to_fault()
                self._ledger.emit(CloseLane(event.lane, fault))
                return
            if known:
                self._ledger.count.stale += 1
            else:
                flow.take_credit(grant)

    def done(self, event: DoneReceived) -> None:
        flow = self.flows.get(event.key)
        if flow is None or flow.lane != event.lane:
            self._ledger.count.stale += 1
        elif len(flow.sent) + len(flow.sending) < len(flow.slots) or not flow.slots:
            fault = ProtocolViolation("a transfer was acknowledged before all of it was sent").to_fault()
            self._ledger.emit(CloseLane(event.lane, fault))
        else:
            self.deliver(flow)

    def aborted(self, event: AbortReceived) -> bool:
        """A consumer may also give up before it has pulled."""
        flow = self.flows.get(event.key)
        if flow is None or flow.local or flow.lane not in (None, event.lane):
            return False
        self.fail(flow, event.fault.to_error(), tell_peer=False)
        return True

    def sent(self, event: ChunkSent) -> None:
        led = self._ledger
        lane = led.lanes.get(event.lane)
        if not led.staging.unpin(event.out_of, Pin.SEND):
            led.count.stale += 1
            return
        if lane is not None:
            lane.in_transport -= 1
        flow = self.flows.get(event.key)
        if flow is None or event.chunk not in flow.sending:
            return
        flow.sending.remove(event.chunk)
        flow.sent.add(event.chunk)  # when not ok the lane is lost, and its LaneDown ends the flow
        led.staging.move(event.out_of, SlotState.HELD)
        if event.ok:
            led.count.sent_bytes += flow.size_of(event.chunk)

    def lane_down(self, lane: LaneId, error: IsthmusError) -> None:
        for flow in [flow for flow in self.flows.values() if flow.lane == lane]:
            self.fail(flow, error, tell_peer=False)

    # --- ends

    def deliver(self, flow: OutFlow) -> None:
        flow.advance(OutInput.DELIVERED)
        self._end(flow, None)

    def fail(self, flow: OutFlow, error: IsthmusError, *, tell_peer: bool = True) -> None:
        flow.advance(OutInput.FAILED)
        if tell_peer and flow.lane is not None:
            self._ledger.emit(SendAbort(flow.lane, flow.key, error.to_fault()))
        self._end(flow, error)

    def _end(self, flow: OutFlow, error: IsthmusError | None) -> None:
        led, fault = self._ledger, error.to_fault() if error is not None else None
        del self.flows[flow.key]
        led.staging.leave_queue(Side.OUT, flow.key)
        for ref in flow.slots:
            led.staging.give_back(ref)
        if flow.owner is not None and flow.owner in led.clients:
            led.emit(SinkEnded(flow.owner, flow.key, fault))
        led.closed(Side.OUT, flow.key, total_bytes=flow.total_bytes, opened_s=flow.opened_s, fault=fault)

    def expire(self) -> None:
        now_s = self._ledger.now_s
        for flow in list(self.flows.values()):
            if flow.deadline_s <= now_s:
                self.fail(flow, DeadlineExceeded("the transfer was not taken within its deadline"))
            elif flow.state is OutState.QUEUED and flow.wait_until_s <= now_s:
                self.fail(flow, StagingFull("no staging memory became free in time", todo="prefill elsewhere"))

    # --- sending

    def pump(self) -> None:
        """Hand chunks to the transports: those that are filled and credited, in order, at each lane's rate."""
        for lane in self._ledger.lanes.values():
            while lane.in_transport < LANE_WINDOW_CHUNKS and self._send_one(lane):
                pass

    def _send_one(self, lane: Lane) -> bool:
        led = self._ledger
        chosen = lane.order.pick(self._candidates(lane))
        if chosen is None:
            return False
        flow = self.flows[chosen.key]
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
        chunk, ref = grant.chunk, flow.slots[grant.chunk]
        led.staging.pin(ref, Pin.SEND)
        led.staging.move(ref, SlotState.SENDING)
        led.emit(SendChunk(lane.lane, flow.key, chunk, chunk * flow.chunk_bytes, size, ref, grant.into))
        return True

    def _candidates(self, lane: Lane) -> Iterator[Candidate]:
        for flow in self.flows.values():
            if flow.lane == lane.lane and flow.sendable:
                yield Candidate(flow.source, flow.deadline_s, flow.key)

    def check_invariants(self) -> None:
        for key, flow in self.flows.items():
            assert flow.key == key
            assert flow.state is not OutState.ENDED
            assert (flow.state is OutState.QUEUED) == (not flow.slots)
            spent = set(flow.credits), flow.sending, flow.sent
            assert sum(map(len, spent)) == len(set().union(*spent)), "a credit was spent twice"
            assert sorted(flow.sendable) == sorted(flow.filled & set(flow.credits))
            assert flow.sending | flow.sent <= flow.filled <= set(range(len(flow.slots)))
            assert flow.state is not OutState.SEALED or flow.all_filled
            assert flow.owner is not None or flow.state is OutState.SEALED
