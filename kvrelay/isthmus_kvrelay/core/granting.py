"""Credit for single chunks: landing slots that a flow holds anyway are named to its sender as work requests and host
time allow, the earliest deadline first, fair between the lanes that serve one consumer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from isthmus_kvrelay.core.effects import ExpectChunk, SendCredit, SendPull
from isthmus_kvrelay.core.events import StepReported
from isthmus_kvrelay.core.flow import InFlow
from isthmus_kvrelay.core.ledger import Lane, Ledger
from isthmus_kvrelay.core.names import ClientId, FlowKey, Grant, Offer
from isthmus_kvrelay.core.order import FairOrder
from isthmus_kvrelay.core.pacer import Pacer
from isthmus_kvrelay.core.staging import Pin

CHUNK_COST_US = 500.0
"""Until it is measured: 2 MiB received and checksummed at a quarter of a CPU second per GB."""
BATCH_SHARE = 8
"""A lane's work requests are granted when an eighth of them is free: a frame for many chunks, not one for each."""
STEP_STALE_STEPS = 10
STEP_STALE_MIN_S = 0.25
"""After so long without a step nothing decodes there, and nothing needs protection."""


@dataclass(slots=True)
class HostBudget:
    """One consumer's: microseconds of this host per decode step."""

    pacer: Pacer
    budget_us: int
    until_s: float
    wake_s: float = -math.inf


class Granting:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._flows: dict[FlowKey, InFlow] = {}
        """Those that are landing."""
        self._orders: dict[ClientId, FairOrder] = {}
        self._budgets: dict[ClientId, HostBudget] = {}
        self._turn = 0
        self.chunk_cost_us = CHUNK_COST_US

    def begin(self, flow: InFlow) -> None:
        assert flow.lane is not None
        self._flows[flow.key] = flow
        self._ledger.lanes[flow.lane].granting[flow.key] = None
        self._offer(flow)

    def landed(self, flow: InFlow, chunk: int) -> None:
        led, size = self._ledger, flow.size_of(chunk)
        assert flow.lane is not None
        lane = led.lanes[flow.lane]
        led.credit.consume_chunk(size, flow.in_flight.pop(chunk))
        led.count.landing_s.append(led.now_s - flow.granted_s.pop(chunk))
        led.count.received_bytes += size
        led.count.received_via[lane.via] += size
        lane.received_bytes += size
        lane.work_requests -= 1
        flow.landed.add(chunk)
        self._offer(flow)

    def end(self, flow: InFlow) -> None:
        """It is over, or all of it has landed: what is out of its credit is taken back."""
        if self._flows.pop(flow.key, None) is None:
            return
        lane = self._ledger.lanes.get(flow.lane) if flow.lane is not None else None
        for chunk, host_us in flow.in_flight.items():
            self._ledger.credit.take_back_chunk(flow.size_of(chunk), host_us)
        if lane is not None:
            lane.work_requests -= len(flow.in_flight)
            lane.granting.pop(flow.key, None)
        flow.in_flight, flow.granted_s = {}, {}
        self._withdraw(flow)

    def client_down(self, client: ClientId) -> None:
        self._budgets.pop(client, None)

    # --- host time

    def step(self, event: StepReported) -> None:
        led, per_step = self._ledger, self._ledger.settings.host_us_per_step
        if not per_step or event.client not in led.clients:
            return
        until_s = led.now_s + max(STEP_STALE_MIN_S, STEP_STALE_STEPS * event.step_s)
        rate = per_step / event.step_s
        budget = self._budgets.get(event.client)
        burst = max(math.ceil(per_step), self._cost_us)
        if budget is None or budget.budget_us != burst:
            pacer = Pacer(rate_bytes_per_s=rate, burst_bytes=burst, now_s=led.now_s)
            self._budgets[event.client] = HostBudget(pacer, burst, until_s)
        else:
            budget.pacer.set_rate(rate, now_s=led.now_s)
            budget.until_s = until_s

    @property
    def _cost_us(self) -> int:
        return max(1, math.ceil(self.chunk_cost_us))

    def _host_allows(self, client: ClientId) -> bool:
        """Whether one more chunk fits into that consumer's budget now; else a timer is set."""
        led, budget = self._ledger, self._budgets.get(client)
        if budget is None or budget.until_s <= led.now_s:
            return True
        cost_us = min(self._cost_us, budget.budget_us)
        ready_s = min(budget.pacer.ready_at_s(cost_us, now_s=led.now_s), budget.until_s)
        if ready_s > led.now_s:
            if budget.wake_s <= led.now_s or ready_s < budget.wake_s:
                budget.wake_s = ready_s
                led.wake_at(ready_s)
            return False
        budget.pacer.spend(cost_us, now_s=led.now_s)
        return True

    # --- grants

    def pump(self) -> None:
        batches: dict[FlowKey, list[Grant]] = {}
        clients = list(self._orders)
        if not clients:
            return
        self._turn = (self._turn + 1) % len(clients)
        for client in clients[self._turn :] + clients[: self._turn]:
            self._pump_client(client, batches)
        for key, grants in batches.items():
            flow = self._flows[key]
            assert flow.lane is not None
            if flow.eager and not flow.landed:
                self._withdraw(flow)  # until its first chunk has landed, see `eager`
                offer = Offer(flow.total_bytes, flow.chunk_bytes, flow.manifest, tuple(grants))
                self._ledger.emit(SendPull(flow.lane, key, flow.pull, offer))
            else:
                self._ledger.emit(SendCredit(flow.lane, key, flow.pull, tuple(grants)))

    def _pump_client(self, client: ClientId, batches: dict[FlowKey, list[Grant]]) -> None:
        led, order, full = self._ledger, self._orders[client], set[int]()
        opened = {lane.lane for lane in led.lanes.values() if self._batch_is_free(lane)}
        while (chosen := order.peek(without=full)) is not None:
            flow = self._flows[chosen.key]
            lane = led.lanes[flow.lane] if flow.lane is not None else None
            assert lane is not None
            if lane.lane not in opened or not self._work_allows(lane, flow):
                full.add(lane.lane)
                oldest = self._reserve_of(lane)
                if oldest is None or oldest.client != client:
                    continue
                flow = oldest
            if not self._host_allows(client):
                return
            batches.setdefault(flow.key, []).append(self._grant(flow, lane))
            order.served(lane.lane, flow.size_of(flow.granted - 1))

    def _batch_is_free(self, lane: Lane) -> bool:
        depth = lane.depth
        return depth is None or not lane.work_requests or depth - lane.work_requests >= max(1, depth // BATCH_SHARE)

    def _work_allows(self, lane: Lane, flow: InFlow) -> bool:
        """One work request is always kept for the lane's oldest flow, so that it goes on whatever the others do."""
        depth = lane.depth
        if depth is None:
            return True
        oldest = self._flows[next(iter(lane.granting))]
        kept = 1 if oldest is not flow and not oldest.in_flight else 0
        return depth - lane.work_requests > kept

    def _reserve_of(self, lane: Lane) -> InFlow | None:
        """The lane's oldest flow with chunks to grant, if it has none under way and its reserve is there."""
        depth = lane.depth
        oldest = self._flows[next(iter(lane.granting))]
        usable = depth is None or lane.work_requests < depth
        return oldest if usable and not oldest.in_flight else None

    def _grant(self, flow: InFlow, lane: Lane) -> Grant:
        led, chunk, host_us = self._ledger, flow.granted, self._cost_us
        size, ref = flow.size_of(chunk), flow.slots[chunk]
        flow.granted += 1
        flow.in_flight[chunk] = host_us
        flow.granted_s[chunk] = led.now_s
        led.credit.grant_chunk(size, host_us)
        lane.work_requests += 1
        led.staging.pin(ref, Pin.RECEIVE)
        led.emit(ExpectChunk(lane.lane, flow.key, chunk, chunk * flow.chunk_bytes, size, ref))
        if flow.granted == flow.chunks:
            lane.granting.pop(flow.key)
            self._withdraw(flow)
        elif self._at_cap(flow, lane):
            self._withdraw(flow)
        return Grant(chunk, ref)

    def _at_cap(self, flow: InFlow, lane: Lane) -> bool:
        """A flow whose producer is slow must not sit on all of a lane's work requests."""
        depth = lane.depth
        return depth is not None and len(flow.in_flight) >= max(1, depth // max(1, len(lane.granting)))

    def _offer(self, flow: InFlow) -> None:
        if flow.granted == flow.chunks:
            return
        assert flow.lane is not None
        order = self._orders.get(flow.client)
        if order is None:
            order = self._orders[flow.client] = FairOrder()
        order.offer(flow.lane, deadline_s=flow.deadline_s, opened_s=flow.opened_s, key=flow.key)

    def _withdraw(self, flow: InFlow) -> None:
        order = self._orders.get(flow.client)
        if order is not None:
            order.withdraw(flow.key)
            if not len(order):
                del self._orders[flow.client]

    def check_invariants(self, flows: Iterable[InFlow]) -> None:
        led, landing = self._ledger, list(self._flows.values())
        out = [(flow, chunk, us) for flow in flows for chunk, us in flow.in_flight.items()]
        led.credit.staging_slots.check_in_flight(len(out))
        led.credit.staging_bytes.check_in_flight(sum(flow.size_of(chunk) for flow, chunk, _ in out))
        led.credit.work_requests.check_in_flight(len(out))
        led.credit.host_us.check_in_flight(sum(us for _, _, us in out))
        for flow in landing:
            assert set(flow.in_flight) | flow.landed == set(range(flow.granted))
            assert not set(flow.in_flight) & flow.landed
            assert set(flow.in_flight) == set(flow.granted_s)
        for lane in led.lanes.values():
            under_way = sum(len(flow.in_flight) for flow in landing if flow.lane == lane.lane)
            assert lane.work_requests == under_way
            assert lane.depth is None or under_way <= lane.depth
            wanted = {flow.key for flow in landing if flow.lane == lane.lane and flow.granted < flow.chunks}
            assert set(lane.granting) == wanted
            self._check_progress(lane)

    def _check_progress(self, lane: Lane) -> None:
        """The lane's oldest flow has a chunk under way, or waits for host time, or for one that is under way."""
        if lane.granting:
            oldest = self._flows[next(iter(lane.granting))]
            budget = self._budgets.get(oldest.client)
            waits = budget is not None and budget.wake_s > self._ledger.now_s
            assert oldest.in_flight or waits or lane.work_requests == lane.depth
