"""The relay's core: one door in (`handle`), effects out, time an argument.

It decides who gets staging, who may send what and when, and what each death or deadline frees. It opens no socket,
reads no clock, logs nothing; the daemon, the simulator and the tests run this same class.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import Effect, Event, Side
from isthmus_kvrelay.core.in_side import InSide
from isthmus_kvrelay.core.ledger import Lane, Ledger, RelaySettings
from isthmus_kvrelay.core.out_side import OutSide
from isthmus_kvrelay.core.pacer import Pacer
from isthmus_kvrelay.core.staging import Pin, SlotState

PACER_BURST_CHUNKS = 4
"""Burst of a lane's pacer: enough for two streams to each have one chunk on the wire and one behind it."""


@dataclass(frozen=True, slots=True)
class RelayStats:
    """A moment's state and the sums since start."""

    slots: dict[SlotState, int]
    slots_total: int
    slot_bytes: int
    flows_out: int
    flows_in: int
    clients: int
    lanes: int
    credits_granted_bytes: int
    credits_outstanding_bytes: int
    quarantines: int
    """Slots put into quarantine since the start."""
    sent_bytes: int
    received_bytes: int
    stale: int
    delivered_out: int
    delivered_in: int
    failures: dict[str, int]
    """By fault code."""

    @property
    def at_rest(self) -> bool:
        """Nothing is held for anybody."""
        return self.slots[SlotState.FREE] == self.slots_total and not self.flows_out and not self.flows_in


class RelayCore:
    def __init__(self, settings: RelaySettings) -> None:
        self.settings = settings
        self._led = Ledger(settings)
        self._out = OutSide(self._led)
        self._in = InSide(self._led, self._out)

    def handle(self, event: Event, *, now_s: float) -> list[Effect]:
        """Effects in the order in which they must be carried out. `now_s` never goes back."""
        led = self._led
        led.now_s = max(led.now_s, now_s)
        led.effects = []
        self._dispatch(event)
        if led.past():
            self._out.expire()
            self._in.expire()
        self._settle()
        return led.effects

    def next_deadline_s(self) -> float | None:
        """When to call `handle(Tick())` at the latest."""
        return self._led.next_deadline_s()

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
                burst = PACER_BURST_CHUNKS * self.settings.slot_bytes
                pacer = Pacer(rate_bytes_per_s=self.settings.rate_bytes_per_s, burst_bytes=burst, now_s=led.now_s)
                lane = Lane(event.lane, event.peer, pacer)
                led.lanes[lane.lane] = lane
                led.lane_to.setdefault(lane.peer, lane.lane)
                self._in.lane_up(lane)
            case ev.LaneDown():
                lost = led.lanes.pop(event.lane, None)
                if lost is None:
                    return
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
                self._out.sent(event)
            case ev.PullReceived() if event.lane in self._led.lanes:
                self._out.pull(event)
            case ev.OpenedReceived():
                self._in.opened(event)
            case ev.CreditReceived():
                self._out.credit(event)
            case ev.DoneReceived():
                self._out.done(event)
            case ev.AbortReceived():
                if not (self._out.aborted(event) or self._in.aborted(event)):
                    self._led.count.stale += 1
            case _:
                self._led.count.stale += 1

    def _settle(self) -> None:
        self._in.follow_local_ends()
        for side, key, slots in self._led.staging.admit():
            (self._out if side is Side.OUT else self._in).reserved(key, slots)
        self._in.attach_ready()
        self._out.pump()

    @property
    def open_flows(self) -> int:
        return len(self._out.flows) + len(self._in.flows)

    def stats(self) -> RelayStats:
        led = self._led
        return RelayStats(
            slots=led.staging.by_state(),
            slots_total=self.settings.total_slots,
            slot_bytes=self.settings.slot_bytes,
            flows_out=len(self._out.flows),
            flows_in=len(self._in.flows),
            clients=len(led.clients),
            lanes=len(led.lanes),
            credits_granted_bytes=led.credit.granted_bytes,
            credits_outstanding_bytes=led.credit.in_flight_bytes,
            quarantines=led.staging.quarantines,
            sent_bytes=led.count.sent_bytes,
            received_bytes=led.count.received_bytes,
            stale=led.count.stale,
            delivered_out=led.count.delivered[Side.OUT],
            delivered_in=led.count.delivered[Side.IN],
            failures=dict(led.count.failed),
        )

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
