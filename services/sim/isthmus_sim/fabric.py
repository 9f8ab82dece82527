"""Lanes between relays in virtual time: a transport's promises to the core (see `core.events`) without any socket.

Control messages of a lane keep their order; chunks may overtake them and each other. The landing table is the real
one, so a slot is written only while it is armed for that very chunk.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import structlog

from isthmus_kvrelay.compiled.load import Loading
from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import Event, LaneId
from isthmus_kvrelay.lane_codec import event_of, messages_of
from isthmus_kvrelay.transports.landing import LandingTable
from isthmus_kvrelay.transports.port import ControlEffect, Emit
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_kvrelay.wire import FrameType, Header, flow_digest
from isthmus_shared.errors import Fault, PartyLost
from isthmus_shared.ids import Incarnation
from isthmus_sim.loop import Life, world_loop

LATENCY_S = (0.0001, 0.002)
BYTES_PER_S = 50e6
"""A slow lane: the largest prompt takes some 20 ms, so that faults strike while it is crossing."""
APART_S = 1e-9
"""Between two control messages of a lane, since timers of one instant have no order."""
SILENCE_S = 5.0
"""After which a lane's other end is given up, as by TCP lanes' pings."""
LATE_S = 1.0

LANE_LOST = PartyLost("the lane to the peer relay was lost").to_fault()
NOT_THERE = PartyLost("no relay of that life answers").to_fault()


@dataclass(eq=False)
class _End:
    transport: SimTransport
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


class Lanes(Protocol):
    """How long things take between two nodes."""

    def latency_s(self) -> float: ...

    def send_s(self, here: str, there: str, size_bytes: int, now_s: float) -> float:
        """Until a chunk that is given to a lane now has left."""
        ...


@dataclass(frozen=True)
class UnsteadyLanes:
    """Each chunk on its own, by chance."""

    rng: random.Random

    def latency_s(self) -> float:
        return self.rng.uniform(*LATENCY_S)

    def send_s(self, here: str, there: str, size_bytes: int, now_s: float) -> float:
        return self.latency_s() + size_bytes / BYTES_PER_S


@dataclass
class SteadyLanes:
    """One chunk after the other, at one rate in each direction between two nodes."""

    latency: float
    bytes_per_s: float
    carried_bytes: int = 0
    _free_s: dict[tuple[str, str], float] = field(default_factory=dict)

    def latency_s(self) -> float:
        return self.latency

    def send_s(self, here: str, there: str, size_bytes: int, now_s: float) -> float:
        self.carried_bytes += size_bytes
        until_s = max(now_s, self._free_s.get((here, there), 0.0)) + size_bytes / self.bytes_per_s
        self._free_s[here, there] = until_s
        return until_s - now_s


class SimTransport:
    """One relay's transport. Once it has died nothing is emitted any more."""

    def __init__(self, fabric: Fabric, life: Life, incarnation: Incarnation, pool: SharedPool, emit: Emit) -> None:
        self.fabric, self.life, self.incarnation, self.pool = fabric, life, incarnation, pool
        self.node = life.name.rpartition(".")[0]
        self.landing = LandingTable(pool)
        self.uncredited_chunks = 0
        self.loading = Loading(structlog.get_logger(), wanted=False)
        self._emit, self._dead = emit, False
        self._closed = asyncio.Event()

    def emit(self, event: Event) -> None:
        if not self._dead:
            self._emit(event)

    async def start(self) -> str:
        self.fabric.relays[self.incarnation] = self
        return f"{self.life.name}:1"

    def dial(self, effect: ev.Dial) -> None:
        self.fabric.dial(self, effect)

    def send(self, effect: ControlEffect) -> None:
        self.fabric.send(effect)

    def send_chunk(self, effect: ev.SendChunk) -> None:
        self.fabric.send_chunk(self, effect)

    def expect(self, effect: ev.ExpectChunk) -> None:
        if self.fabric.connects(effect.lane):
            self.landing.arm(effect)
        else:
            self.fabric.never_lands(self, effect)

    def revoke(self, effect: ev.RevokeFlow) -> None:
        for into in sorted(self.landing.revoke(effect.lane, effect.key), key=lambda ref: ref.slot):
            self.fabric.loop.call_soon(self.emit, ev.SlotQuiet(into), context=self.life.context)

    def close_lane(self, effect: ev.CloseLane) -> None:
        self.fabric.cut_lane(effect.lane, effect.fault)

    async def watch(self) -> None:
        await self._closed.wait()

    async def close(self) -> None:
        self.die()
        self._closed.set()

    def die(self) -> None:
        """At once, with all its lanes."""
        if not self._dead:
            self._dead = True
            self.fabric.relays.pop(self.incarnation, None)
            self.fabric.cut(self)


class Fabric:
    """All lanes of a cluster. `corrupt_chance`: of a chunk's payload, found by its checksum."""

    def __init__(self, rng: random.Random) -> None:
        self.relays: dict[Incarnation, SimTransport] = {}
        self.corrupt_chance = self.late_chance = self.repeat_chance = 0.0
        self.lanes: Lanes = UnsteadyLanes(rng)
        self.slowness: dict[str, float] = {}
        """By node: how much longer its lanes take than they should."""
        self.loop = world_loop()
        self._rng = rng
        self._context = copy_context()
        self._lanes: dict[LaneId, _Wire] = {}
        self._ending: dict[LaneId, list[ev.SlotUse]] = {}
        """Of lanes that are lost while their relay was not told yet: what it will be told is quiet."""
        self._numbers = count(1)
        self._held: dict[tuple[str, str], list[Callable[[], object]]] = {}
        """By the nodes that it goes from and to: what waits in that direction."""

    # -- what transports ask

    def dial(self, transport: SimTransport, effect: ev.Dial) -> None:
        self._after(self._latency_s(), self._dialed, transport, effect)

    def send(self, effect: ControlEffect) -> None:
        wire = self._lanes.get(effect.lane)
        if wire is None:
            return
        here, there = wire.of(effect.lane)
        for message in messages_of(effect):
            event = event_of(there.lane, message)
            assert event is not None
            at_s = self.loop.world_s + self._latency_s() * self._slow(here, there)
            there.ready_s = max(at_s, there.ready_s + APART_S)
            self.loop.at_world(there.ready_s, self._deliver, wire, here, there, event, context=self._context)

    def send_chunk(self, transport: SimTransport, effect: ev.SendChunk) -> None:
        wire = self._lanes.get(effect.lane)
        if wire is None:
            lost = ev.ChunkSent(effect.lane, effect.key, effect.chunk, effect.out_of, ok=False)
            self.loop.call_soon(transport.emit, lost, context=transport.life.context)
            return
        wire.sending[effect.lane, effect.out_of] = effect
        here, there = wire.of(effect.lane)
        nodes = here.transport.node, there.transport.node
        took_s = self.lanes.send_s(*nodes, effect.size_bytes, self.loop.world_s) * self._slow(here, there)
        self._after(took_s, self._through, here, there, lambda: self._sent(wire, effect))

    def connects(self, lane: LaneId) -> bool:
        return lane in self._lanes

    def never_lands(self, transport: SimTransport, effect: ev.ExpectChunk) -> None:
        """It is expected over a lane that is lost: said to be quiet, and not before the lane is said to be down."""
        ending = self._ending.get(effect.lane)
        if ending is not None:
            ending.append(effect.into)
        else:
            self._tell(transport, ev.SlotQuiet(effect.into))

    # -- faults

    def cut(self, transport: SimTransport) -> None:
        """All lanes of a relay are lost, as when a cable is pulled (or it dies)."""
        for wire in dict.fromkeys(self._lanes.values()):
            if any(end.transport is transport for end in wire.ends):
                self._cut(wire, LANE_LOST)

    def cut_between(self, one: str, other: str) -> None:
        for wire in dict.fromkeys(self._lanes.values()):
            if {end.transport.node for end in wire.ends} == {one, other}:
                self._cut(wire, LANE_LOST)

    def cut_lane(self, lane: LaneId, fault: Fault) -> None:
        wire = self._lanes.get(lane)
        if wire is not None:
            self._cut(wire, fault)

    def hold(self, here: str, there: str) -> None:
        """Nothing passes from one node to the other, and nothing is lost."""
        self._held.setdefault((here, there), [])

    def heal(self, here: str, there: str) -> None:
        for arrive in self._held.pop((here, there), []):
            arrive()

    # -- on its way

    def _after(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        self.loop.at_world(self.loop.world_s + delay_s, call, *args, context=self._context)

    def _latency_s(self) -> float:
        return self.lanes.latency_s()

    def _slow(self, here: _End, there: _End) -> float:
        if not self.slowness:
            return 1.0
        return max(self.slowness.get(here.transport.node, 1.0), self.slowness.get(there.transport.node, 1.0))

    def _through(self, here: _End, there: _End, arrive: Callable[[], object]) -> None:
        """Unless that direction is held."""
        held = self._held.get((here.transport.node, there.transport.node)) if self._held else None
        if held is None:
            arrive()
        else:
            held.append(arrive)

    def _tell(self, transport: SimTransport, event: Event) -> None:
        """Within the relay's process, when it runs."""
        self.loop.call_soon(transport.emit, event, context=transport.life.context)

    def _dialed(self, transport: SimTransport, effect: ev.Dial) -> None:
        peer = self.relays.get(effect.peer)
        if peer is None:
            self._tell(transport, ev.DialFailed(effect.peer, NOT_THERE))
            return
        ways = (transport.node, peer.node), (peer.node, transport.node)
        if peer.life.paused or any(way in self._held for way in ways):
            self._after(SILENCE_S, self._tell, transport, ev.DialFailed(effect.peer, NOT_THERE))
            return
        wire = _Wire((_End(transport, LaneId(next(self._numbers))), _End(peer, LaneId(next(self._numbers)))))
        for end in wire.ends:
            self._lanes[end.lane] = wire
        for end, other in (wire.ends, wire.ends[::-1]):
            self._tell(end.transport, ev.LaneUp(end.lane, other.transport.incarnation))

    def _deliver(self, wire: _Wire, here: _End, there: _End, event: Event) -> None:
        def arrive() -> None:
            if wire.alive:
                self._tell(there.transport, event)

        self._through(here, there, arrive)

    def _sent(self, wire: _Wire, effect: ev.SendChunk) -> None:
        if wire.sending.pop((effect.lane, effect.out_of), None) is None:
            return  # the lane was lost, and said so
        here, there = wire.of(effect.lane)
        data = bytes(here.transport.pool.view(effect.out_of.slot, 0, effect.size_bytes))
        for _ in range(2 if self._chance(self.repeat_chance) else 1):
            late_s = self._rng.uniform(0, LATE_S) if self._chance(self.late_chance) else 0.0
            self._after(late_s + self._latency_s(), self._arriving, wire, there, effect, data)
        self._tell(here.transport, ev.ChunkSent(effect.lane, effect.key, effect.chunk, effect.out_of, ok=True))

    def _chance(self, chance: float) -> bool:
        return bool(chance) and self._rng.random() < chance

    def _arriving(self, wire: _Wire, end: _End, effect: ev.SendChunk, data: bytes) -> None:
        """The header is there; the payload follows, and until then the slot is claimed."""
        if wire.alive:
            self.loop.call_soon(self._begin, wire, end, effect, data, context=end.transport.life.context)

    def _begin(self, wire: _Wire, end: _End, effect: ev.SendChunk, data: bytes) -> None:
        transport = end.transport
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
        claim = transport.landing.begin(header, end.lane) if wire.alive else None
        if claim is None:
            transport.uncredited_chunks += wire.alive
            return
        landing, view = claim
        intact = not self._chance(self.corrupt_chance)

        def landed() -> None:
            if not wire.alive:
                return  # the lane's end has reported the slot
            view[:] = data if intact else bytes(byte ^ 0xFF for byte in data)
            if transport.landing.finish(landing):
                transport.emit(ev.ChunkLanded(end.lane, effect.key, effect.chunk, effect.into, intact))
            else:
                transport.emit(ev.SlotQuiet(effect.into))

        self.loop.at_world(self.loop.world_s + self._latency_s(), landed, context=transport.life.context)

    def _cut(self, wire: _Wire, fault: Fault) -> None:
        if not wire.alive:
            return
        wire.alive = False
        for end in wire.ends:
            del self._lanes[end.lane]
            unsent = [effect for (lane, _), effect in wire.sending.items() if lane == end.lane]
            quiet = sorted(end.transport.landing.revoke_lane(end.lane), key=lambda ref: ref.slot)
            self._ending[end.lane] = quiet
            self._after(self._latency_s(), self._down, end, fault, unsent)
        wire.sending.clear()

    def _down(self, end: _End, fault: Fault, unsent: list[ev.SendChunk]) -> None:
        self._tell(end.transport, ev.LaneDown(end.lane, fault))
        for effect in unsent:
            lost = ev.ChunkSent(end.lane, effect.key, effect.chunk, effect.out_of, ok=False)
            self._tell(end.transport, lost)
        for into in self._ending.pop(end.lane):
            self._tell(end.transport, ev.SlotQuiet(into))
