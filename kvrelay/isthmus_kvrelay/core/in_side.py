"""The receiving side: sources of this node's consumers, fed over lanes or from this relay's own staging."""

from __future__ import annotations

from isthmus_kvrelay.core.events import (
    AbortByClient,
    AbortReceived,
    ChunkLanded,
    ClientId,
    Dial,
    DialFailed,
    ExpectChunk,
    FlowKey,
    Grant,
    LaneId,
    OpenedReceived,
    OpenSource,
    ReleaseSource,
    RevokeFlow,
    SendAbort,
    SendCredit,
    SendDone,
    SendPull,
    Side,
    SlotUse,
    SourceFailed,
    SourceReady,
)
from isthmus_kvrelay.core.flow import InFlow, InInput, InState, OutFlow, chunk_count
from isthmus_kvrelay.core.ledger import MAX_FLOWS, Lane, Ledger
from isthmus_kvrelay.core.out_side import OutSide
from isthmus_kvrelay.core.staging import Pin, SlotState
from isthmus_shared.errors import (
    Cancelled,
    ChecksumMismatch,
    DeadlineExceeded,
    Fault,
    IsthmusError,
    ManifestMismatch,
    NoCapacity,
    PartyLost,
    StagingFull,
    StaleParty,
)
from isthmus_shared.ids import Incarnation


class InSide:
    def __init__(self, ledger: Ledger, out: OutSide) -> None:
        self._ledger = ledger
        self._out = out
        self.flows: dict[FlowKey, InFlow] = {}
        self._dialing: set[Incarnation] = set()
        self._unsaid: dict[Incarnation, list[tuple[FlowKey, Fault]]] = {}
        """Aborts of flows that ended before their lane was up; said when it is, at most `MAX_FLOWS` per peer."""

    # --- consumer

    def open(self, event: OpenSource) -> None:
        led = self._ledger
        if len(self.flows) >= MAX_FLOWS:
            refusal: IsthmusError = NoCapacity(f"the relay has {MAX_FLOWS} incoming transfers open")
        elif not led.fence(Side.IN, event.key):
            refusal = StaleParty(f"generation {event.key.generation} of the transfer is not newer than one seen before")
        else:
            self._start(event)
            return
        led.emit(SourceFailed(event.client, event.key, refusal.to_fault()))

    def _start(self, event: OpenSource) -> None:
        led = self._ledger
        for older in [flow for flow in self.flows.values() if flow.key.transfer_id == event.key.transfer_id]:
            self.fail(older, StaleParty(f"generation {older.key.generation} of the transfer was superseded"))
        flow = InFlow(
            key=event.key,
            client=event.client,
            peer=event.source,
            total_bytes=event.total_bytes,
            manifest=event.manifest,
            deadline_s=led.now_s + event.deadline_s,
            opened_s=led.now_s,
            state=InState.CONNECTING,
        )
        self.flows[flow.key] = flow
        led.wake_at(flow.deadline_s)
        if flow.peer == led.settings.incarnation:
            self._attach(flow)
        elif flow.peer in led.lane_to:
            self._pull(flow, led.lane_to[flow.peer])
        elif flow.peer not in self._dialing:
            self._dialing.add(flow.peer)
            led.emit(Dial(flow.peer, event.address))

    def _attach(self, flow: InFlow) -> None:
        """Same relay at both ends: no lane, no copy; the consumer will read the producer's slots."""
        flow.state = InState.ATTACHED
        out = self._out.flows.get(flow.key)
        if out is None or out.taken:
            reason = self._ledger.reason(Side.OUT, flow.key)
            self.fail(flow, reason.to_error() if reason else StaleParty("no such transfer waits here"))
            return
        mismatch = _mismatch(flow, out.total_bytes, out.manifest)
        if mismatch is not None:
            self._out.fail(out, mismatch)
            self.fail(flow, mismatch)
            return
        out.local = True

    def release(self, event: ReleaseSource) -> None:
        led = self._ledger
        led.let_go(event.client, Pin.CONSUMER, event.key)
        flow = self.flows.get(event.key)
        if flow is None or flow.client != event.client:
            return  # over already; its consumer was told
        if flow.state is not InState.READY:
            self.fail(flow, Cancelled("the consumer gave the transfer up"), tell_client=False)
            return
        flow.advance(InInput.RELEASED)
        self._end(flow, None)
        out = self._local_source(flow)
        if out is not None:
            self._out.deliver(out)
        elif flow.lane in led.lanes and flow.lane is not None:
            led.emit(SendDone(flow.lane, flow.key))

    def abort_by_client(self, event: AbortByClient) -> None:
        flow = self.flows.get(event.key)
        if flow is not None and flow.client == event.client:
            self.fail(flow, event.fault.to_error())

    def client_down(self, client: ClientId) -> None:
        for flow in [flow for flow in self.flows.values() if flow.client == client]:
            self.fail(flow, PartyLost("the consumer of the transfer died"), tell_client=False)

    # --- lanes

    def lane_up(self, lane: Lane) -> None:
        self._dialing.discard(lane.peer)
        for key, fault in self._unsaid.pop(lane.peer, []):
            self._ledger.emit(SendAbort(lane.lane, key, fault))
        for flow in [flow for flow in self.flows.values() if flow.state is InState.CONNECTING]:
            if flow.peer == lane.peer:
                self._pull(flow, lane.lane)

    def dial_failed(self, event: DialFailed) -> None:
        self._dialing.discard(event.peer)
        self._unsaid.pop(event.peer, None)
        for flow in [flow for flow in self.flows.values() if flow.state is InState.CONNECTING]:
            if flow.peer == event.peer:
                self.fail(flow, event.fault.to_error())

    def lane_down(self, lane: LaneId, error: IsthmusError) -> None:
        for flow in [flow for flow in self.flows.values() if flow.lane == lane]:
            if flow.state is not InState.READY:
                self.fail(flow, error, tell_peer=False)

    def _pull(self, flow: InFlow, lane: LaneId) -> None:
        flow.advance(InInput.LANE_UP)
        flow.lane = lane
        self._ledger.emit(SendPull(lane, flow.key))

    def opened(self, event: OpenedReceived) -> None:
        led = self._ledger
        flow = self.flows.get(event.key)
        if flow is None or flow.lane != event.lane or flow.state is not InState.PULLING:
            led.count.stale += 1
            return
        refusal: IsthmusError | None = _mismatch(flow, event.total_bytes, event.manifest)
        if refusal is None and not 0 < event.chunk_bytes <= led.settings.slot_bytes:
            refusal = ManifestMismatch(
                "slot_bytes differ",
                why=f"source {event.chunk_bytes}, here {led.settings.slot_bytes}",
                todo="give both relays the same ISTHMUS_RELAY_SLOT_BYTES",
            )
        if refusal is None and chunk_count(event.total_bytes, event.chunk_bytes) > led.staging.limit[Side.IN]:
            refusal = StagingFull(f"a transfer of {event.total_bytes} bytes can never land in this relay's pool")
        if refusal is not None:
            self.fail(flow, refusal)
            return
        flow.chunk_bytes = event.chunk_bytes
        flow.advance(InInput.OPENED)
        led.staging.queue(Side.IN, flow.key, flow.chunks)

    def reserved(self, key: FlowKey, slots: tuple[SlotUse, ...]) -> None:
        led, flow = self._ledger, self.flows[key]
        assert flow.lane is not None
        flow.slots = slots
        flow.advance(InInput.RESERVED)
        for chunk, ref in enumerate(slots):
            led.staging.pin(ref, Pin.RECEIVE)
            led.credit.grant(flow.size_of(chunk))
            led.emit(ExpectChunk(flow.lane, key, chunk, chunk * flow.chunk_bytes, flow.size_of(chunk), ref))
        led.emit(SendCredit(flow.lane, key, tuple(Grant(chunk, ref) for chunk, ref in enumerate(slots))))

    def landed(self, event: ChunkLanded) -> None:
        led = self._ledger
        if not led.staging.unpin(event.into, Pin.RECEIVE):
            led.count.stale += 1
            return
        flow = self.flows.get(event.key)
        if flow is None or flow.state is not InState.LANDING or flow.slots[event.chunk] != event.into:
            return  # revoked while it was being received: quiet now
        if not event.intact:
            self.fail(flow, ChecksumMismatch(f"chunk {event.chunk} arrived damaged"))
            return
        flow.landed.add(event.chunk)
        led.credit.consume(flow.size_of(event.chunk))
        led.count.received_bytes += flow.size_of(event.chunk)
        led.staging.move(event.into, SlotState.READY)
        if len(flow.landed) == len(flow.slots):
            self._complete(flow, flow.slots, flow.chunk_bytes)

    def attach_ready(self) -> None:
        """Local flows whose producer has filled all."""
        for flow in self.flows.values():
            if flow.state is InState.ATTACHED:
                out = self._out.flows[flow.key]
                if out.all_filled:
                    self._complete(flow, out.slots, out.chunk_bytes)

    def _complete(self, flow: InFlow, slots: tuple[SlotUse, ...], chunk_bytes: int) -> None:
        flow.advance(InInput.COMPLETE)
        self._ledger.hold(flow.client, Pin.CONSUMER, flow.key, slots)
        self._ledger.emit(SourceReady(flow.client, flow.key, tuple(ref.slot for ref in slots), chunk_bytes))

    def aborted(self, event: AbortReceived) -> bool:
        flow = self.flows.get(event.key)
        if flow is None or flow.lane != event.lane:
            return False
        self.fail(flow, event.fault.to_error(), tell_peer=False)
        return True

    # --- ends

    def fail(self, flow: InFlow, error: IsthmusError, *, tell_peer: bool = True, tell_client: bool = True) -> None:
        led, fault = self._ledger, error.to_fault()
        for chunk in flow.in_flight():
            led.credit.take_back(flow.size_of(chunk))
        if flow.in_flight() and flow.lane in led.lanes and flow.lane is not None:
            led.emit(RevokeFlow(flow.lane, flow.key))
        out = self._local_source(flow)
        if flow.state is InState.CONNECTING and flow.peer in self._dialing:
            unsaid = self._unsaid.setdefault(flow.peer, [])
            if len(unsaid) < MAX_FLOWS:
                unsaid.append((flow.key, fault))
        flow.advance(InInput.FAILED)
        if tell_peer and flow.lane in led.lanes and flow.lane is not None:
            led.emit(SendAbort(flow.lane, flow.key, fault))
        if tell_client and flow.client in led.clients:
            led.emit(SourceFailed(flow.client, flow.key, fault))
        self._end(flow, error)
        if out is not None:
            self._out.fail(out, error)

    def _end(self, flow: InFlow, error: IsthmusError | None) -> None:
        led, fault = self._ledger, error.to_fault() if error is not None else None
        del self.flows[flow.key]
        led.staging.leave_queue(Side.IN, flow.key)
        for ref in flow.slots:
            led.staging.give_back(ref)
        led.closed(Side.IN, flow.key, total_bytes=flow.total_bytes, opened_s=flow.opened_s, fault=fault)

    def _local_source(self, flow: InFlow) -> OutFlow | None:
        out = self._out.flows.get(flow.key)
        if flow.peer == self._ledger.settings.incarnation and out is not None and out.local:
            return out
        return None

    def follow_local_ends(self) -> None:
        """A local out-flow that ended takes its consumer's end with it."""
        for flow in [flow for flow in self.flows.values() if flow.peer == self._ledger.settings.incarnation]:
            if flow.key not in self._out.flows:
                reason = self._ledger.reason(Side.OUT, flow.key)
                self.fail(flow, reason.to_error() if reason else PartyLost("the transfer's source is gone"))

    def expire(self) -> None:
        for flow in list(self.flows.values()):
            if flow.deadline_s <= self._ledger.now_s:
                self.fail(flow, DeadlineExceeded("the transfer was not finished within its deadline"))

    def check_invariants(self) -> None:
        in_flight = [(flow, chunk) for flow in self.flows.values() for chunk in flow.in_flight()]
        self._ledger.credit.check_invariants(
            landing_slots=len(in_flight), landing_bytes=sum(flow.size_of(chunk) for flow, chunk in in_flight)
        )
        for key, flow in self.flows.items():
            assert flow.key == key
            assert flow.state is not InState.ENDED
            assert (flow.state is InState.CONNECTING) <= (flow.peer in self._dialing)
            if flow.state is InState.ATTACHED:
                assert self._out.flows[key].local
            if flow.state is InState.READY and flow.lane is not None:
                assert len(flow.landed) == len(flow.slots) == flow.chunks


def _mismatch(flow: InFlow, total_bytes: int, manifest: str) -> ManifestMismatch | None:
    if flow.total_bytes != total_bytes:
        return ManifestMismatch(
            "total_bytes differ", why=f"source {total_bytes}, consumer {flow.total_bytes}", param="total_bytes"
        )
    if flow.manifest != manifest:
        return ManifestMismatch(
            "manifests differ", why=f"source {manifest}, consumer {flow.manifest}", param="manifest"
        )
    return None
