"""The sending side: sinks of this node's producers, pulled by consumers over lanes or on this node."""

from __future__ import annotations

from isthmus_kvrelay.core.effects import (
    CloseClient,
    CloseLane,
    SendAbort,
    SendDeclined,
    SendOpened,
    SinkEnded,
    SinkOpened,
)
from isthmus_kvrelay.core.events import (
    AbortByClient,
    AbortReceived,
    ChunksFilled,
    CreditReceived,
    DoneReceived,
    OpenSink,
    PullReceived,
    RevokeReceived,
    SealSink,
)
from isthmus_kvrelay.core.flow import OutFlow, OutInput, OutState, chunk_count, mismatch_of
from isthmus_kvrelay.core.gate import Gate
from isthmus_kvrelay.core.ledger import MAX_FLOWS, Ledger
from isthmus_kvrelay.core.names import ClientId, FlowKey, Grant, LaneId, Offer, Side, SlotUse
from isthmus_kvrelay.core.sending import Sending
from isthmus_kvrelay.core.staging import Pin, SlotState
from isthmus_shared.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    IsthmusError,
    NoCapacity,
    PartyLost,
    ProtocolViolation,
    Retry,
    StagingFull,
    StaleParty,
)
from isthmus_shared.ids import TransferId


class OutSide:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.flows: dict[FlowKey, OutFlow] = {}
        self.retained: dict[FlowKey, OutFlow] = {}
        """Flows that are over and whose slots `Staging` retains."""
        self.local_lost: list[FlowKey] = []
        """Flows that a consumer on this node has no more; `InSide` empties this."""
        self.sending = Sending(ledger, self.flows)
        self._newest: dict[TransferId, FlowKey] = {}
        """Of the flows that are open or retained."""
        self._quota = Gate(ledger.settings.client_limit(ledger.settings.out_limit))

    # --- producer

    def open(self, event: OpenSink) -> None:
        led = self._ledger
        slots = chunk_count(event.total_bytes, led.settings.slot_bytes)
        refusal = self._refusal(event, slots)
        if refusal is not None:
            led.emit(SinkEnded(event.client, event.key, refusal.to_fault()))
            return
        self._supersede(event.key)
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
            retain_until_s=led.now_s + max(event.deadline_s, event.retain_s),
        )
        self.flows[flow.key] = flow
        self._newest[flow.key.transfer_id] = flow.key
        self._quota.ask(flow.source, flow.key, slots)
        led.wake_at(flow.deadline_s, (Side.OUT, flow.key))
        led.wake_at(flow.wait_until_s, (Side.OUT, flow.key))

    def _supersede(self, key: FlowKey) -> None:
        older = self._newest.get(key.transfer_id)
        if older in self.flows:
            self.fail(self.flows[older], StaleParty(f"generation {older.generation} of the transfer was superseded"))
        if older in self.retained:
            self._evict(older)

    def admit(self) -> None:
        """Those within their client's share of the pool get in line for slots."""
        for key, slots in self._quota.admit():
            self.flows[key].advance(OutInput.ADMITTED)
            self.flows[key].counted = True
            self._ledger.staging.queue(Side.OUT, key, slots)

    def _refusal(self, event: OpenSink, slots: int) -> IsthmusError | None:
        led = self._ledger
        if led.draining:
            return Draining("the relay is going away", todo="prefill elsewhere")
        if event.total_bytes <= 0:
            return InvalidRequest(f"a transfer of {event.total_bytes} bytes", param="total_bytes")
        limit = led.settings.client_limit(led.settings.out_limit)
        if slots > limit:
            return InvalidRequest(
                f"a transfer of {event.total_bytes} bytes can never be staged here",
                why=f"outgoing transfers of one client may use {limit * led.settings.slot_bytes} bytes",
                todo="raise ISTHMUS_RELAY_POOL_BYTES, ISTHMUS_RELAY_OUT_SHARE or ISTHMUS_RELAY_CLIENT_SHARE",
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
            flow.fill(chunk, self._ledger.now_s)
            self._ledger.staging.move(flow.slots[chunk], SlotState.HELD)
            self._ledger.let_go(event.client, Pin.PRODUCER, event.key, flow.slots[chunk])
        self.sending.offer(flow)

    def seal(self, event: SealSink) -> None:
        flow = self.flows.get(event.key)
        if flow is None or flow.owner != event.client or flow.state is OutState.SEALED:
            # Over already: delivered before its seal was read, or ended. No word but this will say that its producer
            # writes no more.
            self._ledger.let_go(event.client, Pin.PRODUCER, event.key)
            return
        if not flow.all_filled:
            fault = ProtocolViolation("a sink was sealed before all of it was filled").to_fault()
            self._ledger.emit(CloseClient(event.client, fault))
            return
        flow.advance(OutInput.SEAL)
        if flow.orphaned_by is not None:
            self.end_retained(flow, flow.orphaned_by)

    def abort_by_client(self, event: AbortByClient) -> None:
        flow = self.flows.get(event.key)
        if flow is not None and flow.owner == event.client:
            self.fail(flow, event.fault.to_error())
        if event.key in self.retained and self.retained[event.key].source == event.client:
            self._evict(event.key)

    def client_down(self, client: ClientId) -> None:
        for flow in [flow for flow in self.flows.values() if flow.owner == client]:
            if flow.state is OutState.SEALED:
                flow.owner = None
            else:
                self.fail(flow, PartyLost("the producer of the transfer died before it was sealed"))

    # --- consumer's relay

    def pull(self, event: PullReceived) -> None:
        refusal = self.take(event.key, event.pull)
        if refusal is not None:
            self._ledger.emit(SendAbort(event.lane, event.key, event.pull, refusal.to_fault()))
            return
        flow = self.flows[event.key]
        flow.lane = event.lane
        if event.offer is not None:
            self._weigh(flow, event.lane, event.offer)
        else:
            self._answer_pull(flow)

    def _weigh(self, flow: OutFlow, lane: LaneId, offer: Offer) -> None:
        """Use the credit that came with a pull, or decline it."""
        mismatch = mismatch_of(source=flow.content, consumer=offer.content)
        if mismatch is not None:
            self._ledger.emit(SendAbort(lane, flow.key, flow.pull, mismatch.to_fault()))
            self.consumer_lost(flow, mismatch)
        elif flow.slots and offer.chunk_bytes == flow.chunk_bytes:
            self._take_grants(flow, lane, offer.grants)
        else:
            self._ledger.emit(SendDeclined(lane, flow.key, flow.pull))
            self._answer_pull(flow)

    def take(self, key: FlowKey, pull: int) -> IsthmusError | None:
        """Make the flow ready for that consumer, be it taken from another or retained; or say why it can't have it."""
        flow = self.flows.get(key) or self.retained.get(key)
        if flow is None:
            reason = self._ledger.reason(Side.OUT, key)
            return reason.to_error() if reason else StaleParty("no such transfer waits here")
        if pull < flow.pull or (pull == flow.pull and flow.taken):
            self._ledger.count.stale += 1
            return StaleParty(f"attempt {flow.pull} to fetch the transfer came before attempt {pull}")
        if key in self.retained:
            self._revive(flow)
        self._ledger.count.retargets += flow.pull > 0
        if flow.taken:
            self._overtake(flow)
        flow.pull, flow.orphaned_by = pull, None
        return None

    def _revive(self, flow: OutFlow) -> None:
        del self.retained[flow.key]
        flow.slots = self._ledger.staging.wanted_again(flow.key)
        flow.leaving = self.sending.leaving(flow.slots)
        flow.advance(OutInput.PULLED)
        self.flows[flow.key] = flow
        self._ledger.count.revivals += 1

    def _overtake(self, flow: OutFlow) -> None:
        """Another destination has it now; its last one is told."""
        if flow.lane is not None:
            fault = StaleParty("another destination has taken the transfer over").to_fault()
            self._ledger.emit(SendAbort(flow.lane, flow.key, flow.pull, fault))
        self._leave_consumer(flow)

    def _leave_consumer(self, flow: OutFlow) -> None:
        self.sending.withdraw(flow)
        if flow.local:
            self.local_lost.append(flow.key)
        flow.leave_consumer()

    def _answer_pull(self, flow: OutFlow) -> None:
        """Once its slots are there."""
        if flow.slots and flow.lane is not None:
            sizes = flow.total_bytes, flow.chunk_bytes
            self._ledger.emit(SendOpened(flow.lane, flow.key, flow.pull, *sizes, flow.manifest))

    def _pulled(self, event: CreditReceived | DoneReceived | RevokeReceived | AbortReceived) -> OutFlow | None:
        """The flow, if that lane's that attempt is the one that has it."""
        flow = self.flows.get(event.key)
        return flow if flow is not None and (flow.lane, flow.pull) == (event.lane, event.pull) else None

    def credit(self, event: CreditReceived) -> None:
        flow = self._pulled(event)
        if flow is None:
            self._ledger.count.stale += 1
            return
        self._take_grants(flow, event.lane, event.grants)

    def _take_grants(self, flow: OutFlow, lane: LaneId, grants: tuple[Grant, ...]) -> None:
        for grant in grants:
            known = grant.chunk in flow.credits or grant.chunk in flow.sending or grant.chunk in flow.sent
            if not 0 <= grant.chunk < len(flow.slots):
                fault = ProtocolViolation("credit for a chunk that does not exist").to_fault()
                self._ledger.emit(CloseLane(lane, fault))
                return
            self._ledger.count.stale += known
            if not known:
                flow.take_credit(grant, self._ledger.now_s)
        self.sending.offer(flow)

    def done(self, event: DoneReceived) -> None:
        flow = self._pulled(event)
        if flow is None:
            self._ledger.count.stale += 1
        elif not flow.all_sent:
            fault = ProtocolViolation("a transfer was acknowledged before all of it was sent").to_fault()
            self._ledger.emit(CloseLane(event.lane, fault))
        else:
            self.deliver(flow)

    def aborted(self, event: AbortReceived | RevokeReceived) -> bool:
        """A consumer may also give up before it has pulled."""
        flow = self._pulled(event)
        if flow is None:
            flow = self.flows.get(event.key)
            if flow is None or flow.taken or event.pull <= flow.pull:
                return False
            flow.pull = event.pull
        self.consumer_lost(flow, event.fault.to_error())
        return True

    def lane_down(self, lane: LaneId, error: IsthmusError) -> None:
        self.sending.lane_down(lane)
        for flow in [flow for flow in self.flows.values() if flow.lane == lane]:
            self.consumer_lost(flow, error)

    # --- ends

    def consumer_lost(self, flow: OutFlow, error: IsthmusError) -> None:
        """It failed or gave up. A transfer that another destination might still want is kept for it, if that costs
        nobody anything: while its producer still fills it, or among the retained. Its producer may end it any time."""
        if flow.state is OutState.SEALED and (error.retry is Retry.ELSEWHERE or isinstance(error, Cancelled)):
            self.end_retained(flow, error)
        elif flow.state is not OutState.SEALED and isinstance(error, PartyLost):
            self._leave_consumer(flow)
            flow.orphaned_by, flow.orphaned_until_s = error, self._ledger.now_s + self._ledger.settings.retarget_wait_s
            self._ledger.wake_at(flow.orphaned_until_s, (Side.OUT, flow.key))
        else:
            self._leave_consumer(flow)
            self.fail(flow, error)

    def deliver(self, flow: OutFlow) -> None:
        if flow.state is OutState.FILLING:
            flow.advance(OutInput.SEAL)  # its consumer was quicker than its producer's word
        self.end_retained(flow, None)

    def end_retained(self, flow: OutFlow, error: IsthmusError | None) -> None:
        """Over, but kept for another destination, if there is room for that."""
        self._leave_consumer(flow)
        if self._ledger.staging.retain(flow.key, flow.slots):
            flow.advance(OutInput.RETAIN)
            flow.deadline_s, self.retained[flow.key] = flow.retain_until_s, flow
            self._ledger.wake_at(flow.deadline_s, (Side.OUT, flow.key))
            self._end(flow, error)
            flow.slots, flow.owner = (), None
        else:
            flow.advance(OutInput.FAILED if error is not None else OutInput.DELIVERED)
            self._end(flow, error)

    def _evict(self, key: FlowKey) -> None:
        self._ledger.staging.evict(key)
        self.forget_evicted()

    def forget_evicted(self) -> None:
        for key in self._ledger.staging.evicted:
            self.retained.pop(key).advance(OutInput.EVICTED)
            self._forget_newest(key)
        self._ledger.staging.evicted.clear()

    def fail(self, flow: OutFlow, error: IsthmusError) -> None:
        flow.advance(OutInput.FAILED)
        if flow.lane is not None:
            self._ledger.emit(SendAbort(flow.lane, flow.key, flow.pull, error.to_fault()))
        self._leave_consumer(flow)
        self._end(flow, error)

    def _end(self, flow: OutFlow, error: IsthmusError | None) -> None:
        led, fault = self._ledger, error.to_fault() if error is not None else None
        del self.flows[flow.key]
        led.staging.leave_queue(Side.OUT, flow.key)
        self._quota.leave(flow.source, flow.key)
        if flow.counted:
            flow.counted = False
            self._quota.give_back(flow.source, flow.chunks)
        if flow.state is OutState.ENDED:
            self._forget_newest(flow.key)
            for ref in flow.slots:
                led.staging.give_back(ref)
        if flow.owner is not None and flow.owner in led.clients:
            led.emit(SinkEnded(flow.owner, flow.key, fault))
        facts = {"pull": flow.pull, "total_bytes": flow.total_bytes}
        led.closed(Side.OUT, flow.key, **facts, opened_s=flow.opened_s, fault=fault)

    def _forget_newest(self, key: FlowKey) -> None:
        if self._newest.get(key.transfer_id) == key:
            del self._newest[key.transfer_id]

    def expire(self, key: FlowKey) -> None:
        now_s, flow = self._ledger.now_s, self.flows.get(key)
        if key in self.retained and self.retained[key].deadline_s <= now_s:
            self._evict(key)
        if flow is None:
            return
        if flow.deadline_s <= now_s:
            self.fail(flow, DeadlineExceeded("the transfer was not taken within its deadline"))
        elif flow.orphaned_by is not None and flow.orphaned_until_s <= now_s:
            self.fail(flow, flow.orphaned_by)
        elif flow.state in (OutState.GATED, OutState.QUEUED) and flow.wait_until_s <= now_s:
            self.fail(flow, StagingFull("no staging memory became free in time", todo="prefill elsewhere"))

    def check_invariants(self) -> None:
        for key, flow in self.flows.items():
            assert flow.key == key
            assert flow.state not in (OutState.ENDED, OutState.RETAINED)
            assert (flow.state in (OutState.GATED, OutState.QUEUED)) == (not flow.slots)
            spent = set(flow.credits), flow.sending, flow.sent
            assert sum(map(len, spent)) == len(set().union(*spent)), "a credit was spent twice"
            assert sorted(flow.sendable) == sorted((flow.filled & set(flow.credits)) - flow.leaving)
            assert flow.sending | flow.sent | flow.leaving <= flow.filled <= set(range(len(flow.slots)))
            assert flow.state is not OutState.SEALED or flow.all_filled
            assert flow.owner is not None or flow.state is OutState.SEALED
            assert flow.taken or not (flow.credits or flow.sending or flow.sent)
        for key, flow in self.retained.items():
            assert (flow.key, flow.state) == (key, OutState.RETAINED)
        assert set(self.retained) == set(self._ledger.staging.retained)
        assert set(self._newest.values()) >= set(self.flows) | set(self.retained)
        assert self._quota.held_by_all == sum(flow.chunks for flow in self.flows.values() if flow.counted)
        self._quota.check_invariants()
        self.sending.check_invariants()
