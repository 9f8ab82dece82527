"""Lanes between relays in virtual time: a transport's promises to the core (see `core.events`) without any socket.

Control messages of a lane keep their order; chunks may overtake them and each other. The landing table is the real
one, so a slot is written only while it is armed for that very chunk.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import Event, LaneId
from isthmus_kvrelay.lane_codec import event_of, messages_of
from isthmus_kvrelay.transports.landing import LandingTable
from isthmus_kvrelay.transports.port import ControlEffect
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_kvrelay.wire import FrameType, Header, flow_digest
from isthmus_shared.errors import Fault, PartyLost
from isthmus_shared.ids import Incarnation

LATENCY_S = (0.0001, 0.002)
BYTES_PER_S = 50e6
"""A slow lane: the largest prompt takes some 20 ms, so that faults strike while it is crossing."""
APART_S = 1e-9
"""Between two control messages of a lane, since timers of one instant have no order."""

LANE_LOST = PartyLost("the lane to the peer relay was lost").to_fault()


class Relay(Protocol):
    """A relay as its lanes see it. `take` of a dead one does nothing."""

    pool: SharedPool
    landing: LandingTable
    incarnation: Incarnation

    def take(self, event: Event) -> None: ...


@dataclass(eq=False)
class _End:
    relay: Relay
    lane: LaneId
    ready_s: float = 0.0
    """No control message to this end arrives before."""


@dataclass(eq=False)
class _Wire:
    ends: tuple[_End, _End]
    alive: bool = True
    sending: dict[tuple[LaneId, ev.SlotUse], ev.SendChunk] = field(default_factory=dict)

    def of(self, lane: LaneId) -> tuple[_End, _End]:
        """(this end, the other one)."""
        first, second = self.ends
        return (first, second) if first.lane == lane else (second, first)


class Fabric:
    """All lanes of a cluster. `corrupt_chance`: of a chunk's payload, found by its checksum."""

    def __init__(self, rng: random.Random) -> None:
        self.relays: dict[Incarnation, Relay] = {}
        self.corrupt_chance = 0.0
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[LaneId, _Wire] = {}
        self._numbers = count(1)

    def carry_out(self, relay: Relay, effect: ev.Effect) -> None:
        """An effect that concerns lanes."""
        match effect:
            case ev.Dial():
                self._loop.call_later(self._latency_s(), self._dialed, relay, effect)
            case ev.CloseLane():
                self._cut(self._lanes.get(effect.lane), effect.fault)
            case ev.SendChunk():
                self._send_chunk(relay, effect)
            case ev.ExpectChunk():
                relay.landing.arm(effect)
            case ev.RevokeFlow():
                for into in relay.landing.revoke(effect.lane, effect.key):
                    self._loop.call_soon(relay.take, ev.SlotQuiet(into))
            case (
                (ev.SinkOpened() | ev.Attached() | ev.SinkEnded() | ev.SourceReady() | ev.SourceFailed())
                | ev.CloseClient()
                | ev.FlowClosed()
            ):
                raise AssertionError(f"{effect} is no business of a lane")
            case _:
                self._send(effect)

    def cut(self, relay: Relay) -> None:
        """All lanes of a relay are lost, as when a cable is pulled (or it dies)."""
        for wire in dict.fromkeys(self._lanes.values()):
            if any(end.relay is relay for end in wire.ends):
                self._cut(wire, LANE_LOST)

    def _latency_s(self) -> float:
        return self._rng.uniform(*LATENCY_S)

    def _dialed(self, relay: Relay, effect: ev.Dial) -> None:
        peer = self.relays.get(effect.peer)
        if peer is None:
            relay.take(ev.DialFailed(effect.peer, PartyLost("no relay of that life answers").to_fault()))
            return
        wire = _Wire((_End(relay, LaneId(next(self._numbers))), _End(peer, LaneId(next(self._numbers)))))
        for end in wire.ends:
            self._lanes[end.lane] = wire
        for end, other in (wire.ends, wire.ends[::-1]):
            end.relay.take(ev.LaneUp(end.lane, other.relay.incarnation))

    def _send(self, effect: ControlEffect) -> None:
        wire = self._lanes.get(effect.lane)
        if wire is None:
            return
        _, there = wire.of(effect.lane)
        for message in messages_of(effect):
            event = event_of(there.lane, message)
            assert event is not None
            there.ready_s = max(self._loop.time() + self._latency_s(), there.ready_s + APART_S)
            self._loop.call_at(there.ready_s, self._deliver, wire, there, event)

    def _deliver(self, wire: _Wire, end: _End, event: Event) -> None:
        if wire.alive:
            end.relay.take(event)

    def _send_chunk(self, relay: Relay, effect: ev.SendChunk) -> None:
        wire = self._lanes.get(effect.lane)
        if wire is None:
            lost = ev.ChunkSent(effect.lane, effect.key, effect.chunk, effect.out_of, ok=False)
            self._loop.call_soon(relay.take, lost)
            return
        wire.sending[effect.lane, effect.out_of] = effect
        self._loop.call_later(self._latency_s() + effect.size_bytes / BYTES_PER_S, self._sent, wire, effect)

    def _sent(self, wire: _Wire, effect: ev.SendChunk) -> None:
        if wire.sending.pop((effect.lane, effect.out_of), None) is None:
            return  # the lane was lost, and said so
        here, there = wire.of(effect.lane)
        data = bytes(here.relay.pool.view(effect.out_of.slot, 0, effect.size_bytes))
        self._loop.call_later(self._latency_s(), self._arriving, wire, there, effect, data)
        here.relay.take(ev.ChunkSent(effect.lane, effect.key, effect.chunk, effect.out_of, ok=True))

    def _arriving(self, wire: _Wire, end: _End, effect: ev.SendChunk, data: bytes) -> None:
        """The header is there; the payload follows, and until then the slot is claimed."""
        if not wire.alive:
            return
        header = Header(
            FrameType.CHUNK,
            len(data),
            b"",
            b"",
            chunk=effect.chunk,
            into=effect.into,
            offset_bytes=effect.offset_bytes,
            flow=flow_digest(effect.key),
            generation=effect.key.generation,
        )
        claim = end.relay.landing.begin(header, end.lane)
        if claim is None:
            return
        landing, view = claim
        intact = self._rng.random() >= self.corrupt_chance

        def landed() -> None:
            if not wire.alive:
                return  # the lane's end has reported the slot
            view[:] = data if intact else bytes(byte ^ 0xFF for byte in data)
            if end.relay.landing.finish(landing):
                end.relay.take(ev.ChunkLanded(end.lane, effect.key, effect.chunk, effect.into, intact))
            else:
                end.relay.take(ev.SlotQuiet(effect.into))

        self._loop.call_later(self._latency_s(), landed)

    def _cut(self, wire: _Wire | None, fault: Fault) -> None:
        if wire is None or not wire.alive:
            return
        wire.alive = False
        for end in wire.ends:
            del self._lanes[end.lane]
            unsent = [effect for (lane, _), effect in wire.sending.items() if lane == end.lane]
            quiet = sorted(end.relay.landing.revoke_lane(end.lane), key=lambda ref: ref.slot)
            self._loop.call_later(self._latency_s(), self._down, end, fault, unsent, quiet)
        wire.sending.clear()

    def _down(self, end: _End, fault: Fault, unsent: list[ev.SendChunk], quiet: list[ev.SlotUse]) -> None:
        end.relay.take(ev.LaneDown(end.lane, fault))
        for effect in unsent:
            end.relay.take(ev.ChunkSent(end.lane, effect.key, effect.chunk, effect.out_of, ok=False))
        for into in quiet:
            end.relay.take(ev.SlotQuiet(into))
