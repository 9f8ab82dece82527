"""The receiving side: sources of this node's consumers, fed over lanes or from this relay's own staging."""

from __future__ import annotations

from isthmus_kvrelay.core.eager import Eager
from isthmus_kvrelay.core.effects import (
    Dial,
    RevokeFlow,
    SendAbort,
    SendDone,
    SendFeedback,
    SendPull,
    SendRevoke,
    SourceFailed,
    SourceReady,
)
from isthmus_kvrelay.core.events import (
    AbortByClient,
    AbortReceived,
    ChunkLanded,
    DialFailed,
    ItlReported,
    OpenedReceived,
    OpenSource,
    QuietReceived,
    ReleaseSource,
    StepReported,
)
from isthmus_kvrelay.core.flow import InFlow, InInput, InState, chunk_count, mismatch_of
from isthmus_kvrelay.core.gate import Gate
from isthmus_kvrelay.core.granting import Granting
from isthmus_kvrelay.core.ledger import MAX_FLOWS, Lane, Ledger
from isthmus_kvrelay.core.local import Local
from isthmus_kvrelay.core.names import ClientId, FlowKey, LaneId, Side, SlotUse
from isthmus_kvrelay.core.out_side import OutSide
from isthmus_kvrelay.core.quarantine import Quarantine
from isthmus_kvrelay.core.room import KvRoom
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
from isthmus_shared.ids import Incarnation, TransferId

FEEDBACK_INTERVAL_S = 0.05
"""Between two reports to one peer: several per `feedback.HOLD_S`, and at most twenty small frames a second."""


class InSide:
    def __init__(self, ledger: Ledger, out: OutSide) -> None:
        self._ledger = ledger
        self._out = out
        self.flows: dict[FlowKey, InFlow] = {}
        self.granting = Granting(ledger)
        self.quarantine = Quarantine(ledger)
        self.room = KvRoom(ledger)
        self._quota = Gate(ledger.settings.client_limit(ledger.settings.in_limit))
        self.eager = Eager(ledger, self.flows, self.room, self._quota, self.granting)
        self._local = Local(ledger, out, self.flows)
        self._newest: dict[TransferId, FlowKey] = {}
        """Of the open flows."""
        self._dialing: set[Incarnation] = set()
        self._unsaid: dict[Incarnation, list[tuple[FlowKey, int, Fault]]] = {}
        """Aborts of flows that ended before their lane was up; said when it is, at most `MAX_FLOWS` per peer."""

    # --- consumer

    def open(self, event: OpenSource) -> None:
        led = self._ledger
        if len(self.flows) >= MAX_FLOWS:
            refusal: IsthmusError = NoCapacity(f"the relay has {MAX_FLOWS} incoming transfers open")
        elif not led.fence(Side.IN, event.key, event.pull):
            text = f"attempt {event.pull} at generation {event.key.generation} of the transfer"
            refusal = StaleParty(f"{text} is not newer than one seen before")
        else:
            self._start(event)
            return
        led.emit(SourceFailed(event.client, event.key, event.pull, refusal.to_fault()))

    def _start(self, event: OpenSource) -> None:
        led = self._ledger
        older = self._newest.get(event.key.transfer_id)
        if older is not None:
            text = f"attempt {self.flows[older].pull} at generation {older.generation} of the transfer was superseded"
            self.fail(self.flows[older], StaleParty(text))
        flow = InFlow(
            key=event.key,
            pull=event.pull,
            client=event.client,
            peer=event.source,
            total_bytes=event.total_bytes,
            kv_tokens=event.kv_tokens,
            manifest=event.manifest,
            deadline_s=led.now_s + event.deadline_s,
            opened_s=led.now_s,
            state=InState.CONNECTING,
        )
        self.flows[flow.key] = flow
        self._newest[flow.key.transfer_id] = flow.key
        led.wake_at(flow.deadline_s, (Side.IN, flow.key))
        if flow.peer == led.settings.incarnation:
            refusal = self._local.attach(flow)
            if refusal is not None:
                self.fail(flow, refusal)
        elif flow.peer in led.lane_to:
            self._pull(flow, led.lane_to[flow.peer])
        elif flow.peer not in self._dialing:
            self._dialing.add(flow.peer)
            led.emit(Dial(flow.peer, event.address))

    def release(self, event: ReleaseSource) -> None:
        led = self._ledger
        led.let_go(event.client, Pin.CONSUMER, event.key)
        flow = self.flows.get(event.key)
        if flow is None or flow.client != event.client:
            return  # over already; its consumer was told
        if event.consumed and flow.held and flow.state is InState.ATTACHED:
            flow.consumed = True  # the producer's word to us is on its way
        elif flow.state is not InState.READY:
            self.fail(flow, Cancelled("the consumer gave the transfer up"), tell_client=False)
        else:
            self._released(flow)

    def _released(self, flow: InFlow) -> None:
        led, out = self._ledger, self._local.source_of(flow)
        flow.advance(InInput.RELEASED)
        self.room.used(flow)
        self._end(flow, None)
        if out is not None:
            self._out.deliver(out)
        elif flow.lane in led.lanes and flow.lane is not None:
            led.emit(SendDone(flow.lane, flow.key, flow.pull))

    def abort_by_client(self, event: AbortByClient) -> None:
        flow = self.flows.get(event.key)
        if flow is not None and flow.client == event.client:
            self.fail(flow, event.fault.to_error())

    def client_down(self, client: ClientId) -> None:
        for flow in [flow for flow in self.flows.values() if flow.client == client]:
            self.fail(flow, PartyLost("the consumer of the transfer died"), tell_client=False)
        self.room.client_down(client)
        self.granting.client_down(client)

    def step(self, event: StepReported) -> None:
        self.room.step(event)
        self.granting.step(event)

    def itl(self, event: ItlReported) -> None:
        """Tell those who send to that consumer how it fares."""
        led = self._ledger
        if not led.settings.feedback:
            return
        landing = {f.lane for f in self.flows.values() if f.client == event.client and f.state is InState.LANDING}
        for lane in [lane for lane in led.lanes.values() if lane.lane in landing]:
            if led.now_s - lane.told_s >= FEEDBACK_INTERVAL_S:
                lane.told_s = led.now_s
                led.emit(SendFeedback(lane.lane, event.itl_s, event.target_s))

    # --- lanes

    def lane_up(self, lane: Lane) -> None:
        self._dialing.discard(lane.peer)
        for key, pull, fault in self._unsaid.pop(lane.peer, []):
            self._ledger.emit(SendAbort(lane.lane, key, pull, fault))
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
        self.quarantine.lane_down(lane)
        for flow in [flow for flow in self.flows.values() if flow.lane == lane]:
            if flow.state is not InState.READY:
                self.fail(flow, error, tell_peer=False)

    def _pull(self, flow: InFlow, lane: LaneId) -> None:
        flow.advance(InInput.LANE_UP)
        flow.lane = lane
        if not self.eager.begin(flow, self._ledger.lanes[lane]):
            self._ledger.emit(SendPull(lane, flow.key, flow.pull, None))

    def opened(self, event: OpenedReceived) -> None:
        led = self._ledger
        flow = self.flows.get(event.key)
        if flow is None or (flow.lane, flow.pull) != (event.lane, event.pull) or flow.state is not InState.PULLING:
            led.count.stale += 1
            return
        refusal: IsthmusError | None = mismatch_of(source=(event.total_bytes, event.manifest), consumer=flow.content)
        if refusal is None and not 0 < event.chunk_bytes <= led.settings.slot_bytes:
            refusal = ManifestMismatch(
                "slot_bytes differ",
                why=f"source {event.chunk_bytes}, here {led.settings.slot_bytes}",
                todo="give both relays the same ISTHMUS_RELAY_SLOT_BYTES",
            )
        limit = led.settings.client_limit(led.settings.in_limit)
        if refusal is None and chunk_count(event.total_bytes, event.chunk_bytes) > limit:
            refusal = StagingFull(f"a transfer of {event.total_bytes} bytes can never land in this relay's pool")
        if refusal is not None:
            self.fail(flow, refusal)
            return
        flow.chunk_bytes = led.lanes[event.lane].chunk_bytes = event.chunk_bytes
        flow.advance(InInput.OPENED)
        self.room.ask(flow)

    def admit(self) -> None:
        """Those for which their consumer has room get in line for slots, each client within its share of the pool."""
        for key in self.room.admit(self.flows):
            flow = self.flows[key]
            flow.advance(InInput.ROOM)
            self._quota.ask(flow.client, key, flow.chunks)
        for key, slots in self._quota.admit():
            self.flows[key].advance(InInput.ADMITTED)
            self.flows[key].counted = True
            self._ledger.staging.queue(Side.IN, key, slots)

    def reserved(self, key: FlowKey, slots: tuple[SlotUse, ...]) -> None:
        flow = self.flows[key]
        flow.slots = slots
        flow.advance(InInput.RESERVED)
        self.granting.begin(flow)

    def landed(self, event: ChunkLanded) -> None:
        led = self._ledger
        if not led.staging.unpin(event.into, Pin.RECEIVE):
            led.count.stale += 1
            return
        flow = self.flows.get(event.key)
        if (
            flow is None
            or flow.state is not InState.LANDING
            or event.into not in flow.slots[event.chunk : event.chunk + 1]
        ):
            return  # revoked, or declined, while it was being received: quiet now
        if not event.intact:
            if flow.lane in led.lanes and flow.lane is not None:
                led.lanes[flow.lane].checksum_failures += 1
            self.fail(flow, ChecksumMismatch(f"chunk {event.chunk} arrived damaged"))
            return
        self.granting.landed(flow, event.chunk)
        led.staging.move(event.into, SlotState.READY)
        if len(flow.landed) == len(flow.slots):
            self.granting.end(flow)
            self._complete(flow, flow.slots, flow.chunk_bytes)

    def attach_ready(self) -> None:
        """Local flows whose producer has filled all."""
        for flow, out in self._local.ready():
            self._complete(flow, out.slots, out.chunk_bytes)

    def _complete(self, flow: InFlow, slots: tuple[SlotUse, ...], chunk_bytes: int) -> None:
        flow.advance(InInput.COMPLETE)
        if flow.consumed:
            flow.consumed = False
            self._released(flow)
            return
        if not flow.held:
            flow.held = True
            self._ledger.hold(flow.client, Pin.CONSUMER, flow.key, slots)
        self._ledger.emit(SourceReady(flow.client, flow.key, flow.pull, tuple(ref.slot for ref in slots), chunk_bytes))

    def aborted(self, event: AbortReceived) -> bool:
        flow = self.flows.get(event.key)
        if flow is None or (flow.lane, flow.pull) != (event.lane, event.pull):
            return False
        self.fail(flow, event.fault.to_error(), tell_peer=False)
        return True

    def quiet(self, event: QuietReceived) -> None:
        if not self.quarantine.quiet(event.lane, event.key, event.pull):
            self._ledger.count.stale += 1

    # --- ends

    def fail(self, flow: InFlow, error: IsthmusError, *, tell_peer: bool = True, tell_client: bool = True) -> None:
        led, fault = self._ledger, error.to_fault()
        out = self._local.source_of(flow)
        if flow.state is InState.CONNECTING and flow.peer in self._dialing:
            unsaid = self._unsaid.setdefault(flow.peer, [])
            if len(unsaid) < MAX_FLOWS:
                unsaid.append((flow.key, flow.pull, fault))
        lane = flow.lane if flow.lane in led.lanes else None
        armed = [flow.slots[chunk] for chunk in flow.in_flight]
        if lane is not None and armed:
            led.emit(RevokeFlow(lane, flow.key))
            self.quarantine.begin(lane, flow.key, flow.pull, armed)
            led.emit(SendRevoke(lane, flow.key, flow.pull, fault))
        elif lane is not None and tell_peer:
            led.emit(SendAbort(lane, flow.key, flow.pull, fault))
        self.granting.end(flow)
        self.room.give_back(flow)
        flow.advance(InInput.FAILED)
        if tell_client and flow.client in led.clients:
            led.emit(SourceFailed(flow.client, flow.key, flow.pull, fault))
        self._end(flow, error)
        if out is not None:
            self._out.consumer_lost(out, error)

    def _end(self, flow: InFlow, error: IsthmusError | None) -> None:
        led, fault = self._ledger, error.to_fault() if error is not None else None
        del self.flows[flow.key]
        del self._newest[flow.key.transfer_id]
        self._local.forget(flow.key)
        led.staging.leave_queue(Side.IN, flow.key)
        self._quota.leave(flow.client, flow.key)
        if flow.counted:
            self._quota.give_back(flow.client, flow.chunks)
        for ref in flow.slots:
            led.staging.give_back(ref)
        facts = {"pull": flow.pull, "total_bytes": flow.total_bytes}
        led.closed(Side.IN, flow.key, **facts, opened_s=flow.opened_s, fault=fault)

    def follow_local_ends(self) -> None:
        """A local consumer whose source ended, or went to another destination, ends too."""
        for flow, why in self._local.lost():
            self.fail(flow, why)

    def expire(self, key: FlowKey) -> None:
        flow = self.flows.get(key)
        if flow is not None and flow.deadline_s <= self._ledger.now_s:
            self.fail(flow, DeadlineExceeded("the transfer was not finished within its deadline"))

    def check_invariants(self) -> None:
        self.granting.check_invariants(self.flows.values())
        self.room.check_invariants(self.flows.values())
        self.quarantine.check_invariants()
        self.eager.check_invariants()
        self._local.check_invariants()
        assert self._quota.held_by_all == sum(flow.chunks for flow in self.flows.values() if flow.counted)
        assert set(self._newest.values()) == set(self.flows)
        for key, flow in self.flows.items():
            assert flow.key == key
            assert flow.state is not InState.ENDED
            assert (flow.state is InState.CONNECTING) <= (flow.peer in self._dialing)
            if flow.state is InState.READY and flow.lane is not None:
                assert len(flow.landed) == len(flow.slots) == flow.chunks
