"""The relay's core: one door in (`handle`), effects out, time an argument.

It decides who gets staging, who may send what and when, and what each death or deadline frees. It opens no socket,
reads no clock, logs nothing; the daemon, the simulator and the tests run this same class.
"""

from __future__ import annotations

from collections.abc import Callable

from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.effects import Effect
from isthmus_kvrelay.core.events import Event
from isthmus_kvrelay.core.in_side import InSide
from isthmus_kvrelay.core.ledger import Ledger
from isthmus_kvrelay.core.names import FlowKey, Side
from isthmus_kvrelay.core.out_side import OutSide
from isthmus_kvrelay.core.rates import PACER_BURST_CHUNKS as PACER_BURST_CHUNKS
from isthmus_kvrelay.core.rates import Rates
from isthmus_kvrelay.core.settings import RelaySettings
from isthmus_kvrelay.core.staging import Pin
from isthmus_kvrelay.core.stats import LaneStats as LaneStats
from isthmus_kvrelay.core.stats import RelayStats as RelayStats
from isthmus_kvrelay.core.stats import stats_of

_OF_CHUNKS = (ev.ChunkLanded, ev.ChunkSent, ev.SlotQuiet)


class RelayCore:
    def __init__(self, settings: RelaySettings, carry_out: Callable[[Effect], None] | None = None) -> None:
        """`carry_out`: called with each effect as soon as it is decided, instead of returning it: what a peer waits for
        is then on its way while the rest is worked out. It must not call back."""
        self.settings = settings
        self._led = Ledger(settings, carry_out)
        self._rates = Rates(self._led)
        self._out = OutSide(self._led)
        self._in = InSide(self._led, self._out)

    def handle(self, *events: Event, now_s: float) -> list[Effect]:
        """Effects in the order in which they must be carried out. `now_s` never goes back.

        Several events are as if each came alone, but chunks that come together are looked at together: what they
        allow is decided once.
        """
        led = self._led
        led.now_s = max(led.now_s, now_s)
        led.effects = []
        unsettled = False
        for event in events:
            of_chunk = isinstance(event, _OF_CHUNKS)
            if unsettled and not of_chunk:
                self._settle()
            self._dispatch(event)
            unsettled = of_chunk
            if not of_chunk:
                self._settle()
        any_due, named = led.due()
        if any_due:
            self._expire(named)
        if any_due or unsettled:
            self._settle()
        return led.effects

    def next_deadline_s(self) -> float | None:
        """When to call `handle(Tick())` at the latest."""
        return self._led.next_deadline_s()

    def _expire(self, named: list[tuple[Side, FlowKey]]) -> None:
        for side, key in named:
            (self._out if side is Side.OUT else self._in).expire(key)
        self._in.room.expire()
        self._in.quarantine.expire()
        self._rates.expire()

    def _dispatch(self, event: Event) -> None:
        match event:
            case ev.ClientUp() | ev.ClientDown():
                self._client(event)
            case ev.OpenSink():
                self._out.open(event)
            case ev.ChunksFilled():
                self._out.filled(event)
            case ev.SealSink():
                self._out.seal(event)
            case ev.SinkQuiet():
                self._led.let_go(event.client, Pin.PRODUCER, event.key)
            case ev.OpenSource():
                self._in.open(event)
            case ev.ReleaseSource():
                self._in.release(event)
            case ev.AbortByClient():
                self._in.abort_by_client(event)
                self._out.abort_by_client(event)
            case ev.StepReported():
                self._in.step(event)
            case ev.ItlReported():
                self._in.itl(event)
            case ev.RatesSet():
                self._rates.set(event)
            case ev.HostCostMeasured():
                self._in.granting.chunk_cost_us = event.us_per_chunk
            case ev.Drain():
                self._led.draining = True
            case ev.Tick():
                pass
            case ev.LaneUp() | ev.LaneDown() | ev.DialFailed():
                self._lane(event)
            case _:
                self._from_lane(event)

    def _client(self, event: ev.ClientUp | ev.ClientDown) -> None:
        led = self._led
        if isinstance(event, ev.ClientUp):
            led.clients.add(event.client)
            return
        led.clients.discard(event.client)
        self._in.client_down(event.client)
        self._out.client_down(event.client)
        led.let_go_all(event.client)

    def _lane(self, event: ev.LaneUp | ev.LaneDown | ev.DialFailed) -> None:
        led = self._led
        match event:
            case ev.LaneUp():
                lane = self._rates.lane_up(event)
                led.lanes[lane.lane] = lane
                led.lane_to.setdefault(lane.peer, lane.lane)
                self._in.lane_up(lane)
            case ev.LaneDown():
                lost = led.lanes.pop(event.lane, None)
                if lost is None:
                    return
                led.count.decreases += lost.aimd.decreases
                led.lane_to = {other.peer: other.lane for other in led.lanes.values()}
                error = event.fault.to_error()
                self._in.lane_down(event.lane, error)
                self._out.lane_down(event.lane, error)
            case ev.DialFailed():
                self._in.dial_failed(event)

    def _from_lane(self, event: Event) -> None:
        match event:
            case ev.ChunkLanded():
                self._in.landed(event)
            case ev.SlotQuiet():
                if not self._led.staging.unpin(event.into, Pin.RECEIVE):
                    self._led.count.stale += 1
            case ev.ChunkSent():
                self._out.sending.sent(event)
            case ev.QuietReceived():
                self._in.quiet(event)
            case ev.FeedbackReceived():
                self._rates.feedback(event)
            case ev.PullReceived() if event.lane in self._led.lanes:
                self._out.pull(event)
            case ev.DeclinedReceived():
                self._in.eager.declined(event)
            case ev.OpenedReceived():
                self._in.opened(event)
            case ev.CreditReceived():
                self._out.credit(event)
            case ev.DoneReceived():
                self._out.done(event)
            case ev.RevokeReceived() if event.lane in self._led.lanes:
                if not self._out.aborted(event):
                    self._led.count.stale += 1
                self._out.sending.revoked(event)
            case ev.AbortReceived():
                if not (self._out.aborted(event) or self._in.aborted(event)):
                    self._led.count.stale += 1
            case _:
                self._led.count.stale += 1

    def _settle(self) -> None:
        self._settle_once()
        while self._in.eager.settle():
            self._settle_once()

    def _settle_once(self) -> None:
        self._in.follow_local_ends()
        self._out.admit()
        self._in.admit()
        for side, key, slots in self._led.staging.admit():
            (self._out if side is Side.OUT else self._in).reserved(key, slots)
        self._out.forget_evicted()
        self._in.attach_ready()
        self._in.granting.pump()
        self._out.sending.pump()

    @property
    def open_flows(self) -> int:
        return len(self._out.flows) + len(self._in.flows)

    @property
    def open_keys(self) -> tuple[tuple[Side, FlowKey], ...]:
        """Which they are, for diagnosis."""
        return (*((Side.OUT, key) for key in self._out.flows), *((Side.IN, key) for key in self._in.flows))

    def stats(self) -> RelayStats:
        return stats_of(self._led, flows_out=len(self._out.flows), flows_in=len(self._in.flows))

    def take_chunk_times(self) -> tuple[list[float], list[float]]:
        """Since the last call, in seconds: of each chunk sent, how long it had waited filled and credited; of each
        chunk landed, how long after its credit."""
        count = self._led.count
        taken = list(count.queue_s), list(count.landing_s)
        count.queue_s.clear()
        count.landing_s.clear()
        return taken

    def check_invariants(self) -> None:
        """Raises `AssertionError` if this core has a bug."""
        self._led.staging.check_invariants()
        self._out.check_invariants()
        self._in.check_invariants()
        owned = [ref for out in self._out.flows.values() for ref in out.slots]
        owned += [ref for into in self._in.flows.values() for ref in into.slots]
        assert all(self._led.staging.is_current(ref) for ref in owned)
        assert len(owned) == len({ref.slot for ref in owned}), "a slot has two owners"
        assert {ref.slot for ref in owned} == self._led.staging.live_slots(), "a slot leaked"
        for lane in self._led.lanes.values():
            assert lane.in_transport >= 0
