"""Several relay cores on simulated lanes, with engines that write, read, die and come late. No time, thread or socket.

What is checked at every step: each core's own invariants; that a consumer only ever reads the bytes that were meant
for it, from `SourceReady` until it lets go; that nothing is delivered twice. `settle` ends a run: it lets everything
finish or expire and checks that nothing is held anywhere.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import ClientId, Effect, Event, ExpectChunk, FlowKey, LaneId, SendChunk, SlotUse
from isthmus_kvrelay.core.relay import RelayCore
from isthmus_kvrelay.core.settings import RelaySettings
from isthmus_shared.errors import Cancelled, Fault, PartyLost
from isthmus_shared.ids import Generation, Incarnation, TransferId

SLOT_BYTES = 10
LOST = PartyLost("the lane was cut").to_fault()
Content = tuple[FlowKey, int] | str
"""What a slot holds: (flow, chunk), or a word for anything else."""


@dataclass
class Chunk:
    """A chunk on the wire: what it says it is, and what it holds."""

    job: SendChunk
    content: Content


@dataclass
class Wire:
    """One lane. `ends[i]` is (node name, its number for the lane); messages of end i wait in `control[i]`."""

    ends: tuple[tuple[str, LaneId], tuple[str, LaneId]]
    control: tuple[deque[Event], deque[Event]] = field(default_factory=lambda: (deque(), deque()))
    unsent: tuple[list[SendChunk], list[SendChunk]] = field(default_factory=lambda: ([], []))
    flying: tuple[list[Chunk], list[Chunk]] = field(default_factory=lambda: ([], []))
    alive: bool = True


@dataclass
class Sink:
    bell: tuple[Client, int] | None = None
    """The consumer on this node, and which pull of it, that may be told directly."""
    slots: tuple[int, ...] = ()
    opened: bool = False
    ended: bool = False
    filled: set[int] = field(default_factory=set)
    total_bytes: int = 0


@dataclass
class Source:
    pull: int = 1
    slots: tuple[int, ...] | None = None
    failed: Fault | None = None
    attached: tuple[int, ...] | None = None
    """Where a producer on this node is filling it."""


@dataclass
class Client:
    number: ClientId
    sinks: dict[FlowKey, Sink] = field(default_factory=dict)
    sources: dict[FlowKey, Source] = field(default_factory=dict)


@dataclass
class Node:
    name: str
    core: RelayCore
    memory: dict[int, Content] = field(default_factory=dict)
    armed: dict[SlotUse, ExpectChunk] = field(default_factory=dict)
    claimed: dict[SlotUse, tuple[ExpectChunk, Content]] = field(default_factory=dict)
    revoked: set[SlotUse] = field(default_factory=set)
    clients: dict[ClientId, Client] = field(default_factory=dict)
    dials: list[ev.Dial] = field(default_factory=list)
    lives: int = 1
    delivered: set[tuple[FlowKey, int]] = field(default_factory=set)

    @property
    def incarnation(self) -> Incarnation:
        return self.core.settings.incarnation


class World:
    def __init__(
        self, names: Iterable[str], *, total_slots: int, rate_bytes_per_s: float = math.inf, **settings: Any
    ) -> None:
        """`settings`: further ones of `RelaySettings`."""
        self.now_s = 100.0
        self._settings = {"total_slots": total_slots, "rate_bytes_per_s": rate_bytes_per_s, "out_share": 0.5} | settings
        self.nodes = {name: Node(name, self._core(name, 1)) for name in names}
        self.wires: list[Wire] = []
        self._by_end: dict[tuple[str, LaneId], tuple[Wire, int]] = {}
        self._numbers = 0
        self.to_cut: deque[Wire] = deque()
        """Lanes that a core has closed: a peer was too slow to say that it is quiet."""
        self.pending: deque[tuple[Node, Incarnation, Event]] = deque()
        self.totals: dict[FlowKey, int] = {}
        self.homes: dict[FlowKey, tuple[Incarnation, str]] = {}
        self.sent: list[tuple[float, str, LaneId, int]] = []
        """(when, node, lane, bytes) of every chunk handed to a lane."""

    def _core(self, name: str, life: int) -> RelayCore:
        return RelayCore(
            RelaySettings(incarnation=Incarnation(f"{name}{life}"), slot_bytes=SLOT_BYTES, **self._settings)
        )

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    # --- the cores' shell

    def tell(self, node: Node, event: Event) -> None:
        self.tell_only(node, event)
        node.core.check_invariants()

    def tell_only(self, node: Node, event: Event) -> None:
        for effect in node.core.handle(event, now_s=self.now_s):
            self._carry_out(node, effect)

    def write(self, node: Node, slot: int, content: Content) -> None:
        """Somebody's bytes go into a slot."""
        node.memory[slot] = content
        self.check_all_reading()

    def _carry_out(self, node: Node, effect: Effect) -> None:
        match effect:
            case ev.Attached():
                self._introduce(node, effect)
            case ev.SinkOpened() | ev.SinkEnded() | ev.SourceReady() | ev.SourceFailed() | ev.CloseClient():
                self._to_client(node, effect)
            case ev.Dial():
                node.dials.append(effect)
            case ev.CloseLane():
                assert effect.fault.what.startswith("the peer did not give revoked slots up"), effect.fault
                wire, _ = self._wire(node, effect.lane)
                if wire is not None:
                    self.to_cut.append(wire)
            case ev.SendChunk():
                self.sent.append((self.now_s, node.name, effect.lane, effect.size_bytes))
                wire, side = self._wire(node, effect.lane)
                if wire is None:
                    self.tell(node, _not_sent(effect))
                else:
                    wire.unsent[side].append(effect)
            case ev.ExpectChunk():
                assert effect.into not in node.armed
                node.armed[effect.into] = effect
            case ev.RevokeFlow():
                self._revoke(node, effect)
            case ev.FlowClosed():
                pass
            case _:
                wire, side = self._wire(node, effect.lane)
                if wire is not None and wire.alive:
                    wire.control[side].append(_received(effect, wire.ends[1 - side][1]))

    def _wire(self, node: Node, lane: LaneId) -> tuple[Wire | None, int]:
        return self._by_end.get((node.name, lane), (None, 0))

    def _revoke(self, node: Node, effect: ev.RevokeFlow) -> None:
        for ref, expected in list(node.armed.items()):
            if (expected.lane, expected.key) == (effect.lane, effect.key):
                del node.armed[ref]
                self._later(node, ev.SlotQuiet(ref))
        for ref, (expected, _) in node.claimed.items():
            if (expected.lane, expected.key) == (effect.lane, effect.key):
                node.revoked.add(ref)

    def _later(self, node: Node, event: Event) -> None:
        self.pending.append((node, node.incarnation, event))

    def tell_pending(self) -> None:
        if self.to_cut:
            wire = self.to_cut.popleft()
            if wire.alive:
                self.cut(wire)
        elif self.pending:
            node, life, event = self.pending.popleft()
            if node.incarnation == life:
                self.tell(node, event)

    # --- engines

    def _to_client(
        self, node: Node, effect: ev.SinkOpened | ev.SinkEnded | ev.SourceReady | ev.SourceFailed | ev.CloseClient
    ) -> None:
        assert not isinstance(effect, ev.CloseClient), f"{node.name} found a client at fault: {effect}"
        client, key = node.clients[effect.client], effect.key
        match effect:
            case ev.SinkOpened():
                sink = client.sinks[key]
                sink.slots, sink.opened = effect.slots, True
                for slot in sink.slots:
                    self.write(node, slot, "being written")
            case ev.SinkEnded():
                if key not in client.sinks:
                    return  # sealed: its producer is done with it
                sink = client.sinks[key]
                assert not sink.ended, "ended twice"
                sink.ended = True
                if not sink.opened:
                    del client.sinks[key]
            case ev.SourceReady():
                assert (key, effect.pull) not in node.delivered, "delivered twice"
                node.delivered.add((key, effect.pull))
                source = client.sources[key]
                assert source.pull == effect.pull
                assert source.failed is None
                source.slots = effect.slots
                self.check_reading(node, client)
            case ev.SourceFailed():
                if key in client.sources:
                    source = client.sources[key]
                    assert source.failed is None, "failed twice"
                    source.failed = effect.fault

    def _introduce(self, node: Node, effect: ev.Attached) -> None:
        consumer = node.clients[effect.consumer]
        consumer.sources[effect.key].attached = effect.slots
        sink = node.clients[effect.producer].sinks.get(effect.key)
        if sink is not None:
            sink.bell = (consumer, effect.pull)

    def check_reading(self, node: Node, client: Client) -> None:
        """Every chunk under a consumer's eyes is what was meant for it."""
        for key, source in client.sources.items():
            for chunk, slot in enumerate(source.slots or ()):
                assert node.memory[slot] == (key, chunk), f"{key} reads {node.memory[slot]}"

    def check_all_reading(self) -> None:
        for node in self.nodes.values():
            for client in node.clients.values():
                self.check_reading(node, client)

    def join(self, node: Node) -> Client:
        client = Client(ClientId(self._number()))
        node.clients[client.number] = client
        self.tell(node, ev.ClientUp(client.number))
        return client

    def leave(self, node: Node, client: Client) -> None:
        del node.clients[client.number]
        self.tell(node, ev.ClientDown(client.number))

    def open_sink(self, node: Node, client: Client, key: FlowKey, total_bytes: int, deadline_s: float) -> None:
        client.sinks[key] = Sink(total_bytes=total_bytes)
        self.totals[key] = total_bytes
        self.homes[key] = (node.incarnation, node.name)
        self.tell(node, ev.OpenSink(client.number, key, total_bytes, "m", deadline_s, wait_s=deadline_s))

    def fill(self, node: Node, client: Client, key: FlowKey, chunk: int) -> None:
        """The engine writes, even if the flow was ended meanwhile and it has not noticed."""
        sink = client.sinks[key]
        self.write(node, sink.slots[chunk], (key, chunk))
        sink.filled.add(chunk)
        self._say(node, sink, ev.ChunksFilled(client.number, key, (chunk,)))

    def seal(self, node: Node, client: Client, key: FlowKey) -> None:
        sink = client.sinks.pop(key)
        if sink.bell is not None:
            self._ring(node, key, *sink.bell)
        self._say(node, sink, ev.SealSink(client.number, key))

    def _say(self, node: Node, sink: Sink, event: Event) -> None:
        """A producer that may ring is heard by its consumer before its relay reads what it has written."""
        if sink.bell is None:
            self.tell(node, event)
        else:
            self._later(node, event)

    def _ring(self, node: Node, key: FlowKey, consumer: Client, pull: int) -> None:
        """The consumer reads before the relay has heard of it, whatever that thinks of the flow meanwhile."""
        source = consumer.sources.get(key)
        if consumer.number in node.clients and source is not None and source.pull == pull and source.failed is None:
            source.slots = source.attached
            self.check_reading(node, consumer)

    def notice_end(self, node: Node, client: Client, key: FlowKey) -> None:
        """The engine comes back to a sink that has ended, and lets go of it."""
        del client.sinks[key]
        self.tell(node, ev.SinkQuiet(client.number, key))

    def open_source(
        self, node: Node, client: Client, key: FlowKey, deadline_s: float, *, pull: int = 1, kv_tokens: int = 0
    ) -> None:
        life, home = self.homes[key]
        client.sources[key] = Source(pull)
        facts = self.totals[key], "m", deadline_s, pull, kv_tokens
        self.tell(node, ev.OpenSource(client.number, key, life, home, *facts))

    def release(self, node: Node, client: Client, key: FlowKey) -> None:
        self.check_reading(node, client)
        source = client.sources.pop(key)
        consumed = source.slots is not None and source.failed is None
        self.tell(node, ev.ReleaseSource(client.number, key, consumed))

    def abort(self, node: Node, client: Client, key: FlowKey) -> None:
        self.tell(node, ev.AbortByClient(client.number, key, Cancelled("cancelled").to_fault()))

    # --- lanes

    def answer_dial(self, node: Node, *, ok: bool) -> None:
        dial = node.dials.pop(0)
        peer = self.nodes[dial.address]
        if not ok or peer.incarnation != dial.peer:
            self.tell(node, ev.DialFailed(dial.peer, LOST))
            return
        here, there = LaneId(self._number()), LaneId(self._number())
        wire = Wire(((node.name, here), (peer.name, there)))
        self.wires.append(wire)
        self._by_end |= {end: (wire, side) for side, end in enumerate(wire.ends)}
        self.tell(peer, ev.LaneUp(there, node.incarnation))
        self.tell(node, ev.LaneUp(here, peer.incarnation))

    def deliver_control(self, wire: Wire, side: int) -> None:
        self.tell(self.nodes[wire.ends[1 - side][0]], wire.control[side].popleft())

    def send(self, wire: Wire, side: int, index: int) -> None:
        """A sending thread takes a job (in any order: there are several threads) and reads the slot."""
        job = wire.unsent[side].pop(index)
        node = self.nodes[wire.ends[side][0]]
        wire.flying[side].append(Chunk(job, node.memory[job.out_of.slot]))
        self.tell(node, ev.ChunkSent(job.lane, job.key, job.chunk, job.out_of, ok=True))

    def begin_receive(self, wire: Wire, side: int, index: int, *, keep_copy: bool) -> None:
        """The receiver reads a chunk's header; `keep_copy`: the same chunk will come again."""
        chunk = wire.flying[side][index] if keep_copy else wire.flying[side].pop(index)
        name, lane = wire.ends[1 - side]
        node, job = self.nodes[name], chunk.job
        expected = node.armed.get(job.into)
        if expected is None or (expected.lane, expected.key, expected.chunk) != (lane, job.key, job.chunk):
            return  # no credit (any more): dropped
        del node.armed[job.into]
        node.claimed[job.into] = (expected, chunk.content)
        self.write(node, job.into.slot, "half received")

    def end_receive(self, node: Node, ref: SlotUse, *, damaged: bool, repeat: bool) -> None:
        expected, content = node.claimed.pop(ref)
        intact = content == (expected.key, expected.chunk) and not damaged
        self.write(node, ref.slot, content if intact else "damaged")
        if ref in node.revoked:
            node.revoked.remove(ref)
            self.tell(node, ev.SlotQuiet(ref))
            return
        for _ in range(2 if repeat else 1):
            self.tell(node, ev.ChunkLanded(expected.lane, expected.key, expected.chunk, ref, intact))

    def cut(self, wire: Wire) -> None:
        """The lane dies; each living end is told, and later that nothing moves any more (`join_threads`)."""
        wire.alive = False
        for side, (name, lane) in enumerate(wire.ends):
            wire.control[side].clear()
            wire.flying[side].clear()
            self.tell(self.nodes[name], ev.LaneDown(lane, LOST))

    def join_threads(self, wire: Wire) -> None:
        self.wires.remove(wire)
        for end in wire.ends:
            del self._by_end[end]
        for side, (name, lane) in enumerate(wire.ends):
            node = self.nodes[name]
            for job in wire.unsent[side]:
                self.tell(node, _not_sent(job))
            left = [ref for ref, expected in node.armed.items() if expected.lane == lane]
            left += [ref for ref, (expected, _) in node.claimed.items() if expected.lane == lane]
            for ref in left:
                node.armed.pop(ref, None)
                node.claimed.pop(ref, None)
                node.revoked.discard(ref)
                self.tell(node, ev.SlotQuiet(ref))

    def restart(self, node: Node) -> None:
        """SIGKILL and a new life: its lanes are cut, its clients are gone, its memory is new."""
        for wire in [wire for wire in self.wires if node.name in (wire.ends[0][0], wire.ends[1][0])]:
            if wire.alive:
                self.cut(wire)
            self.join_threads(wire)
        fresh = Node(node.name, self._core(node.name, node.lives + 1), lives=node.lives + 1)
        self.nodes[node.name] = fresh

    def advance(self, by_s: float) -> None:
        self.now_s += by_s
        for node in list(self.nodes.values()):
            self.tell(node, ev.Tick())

    # --- the end

    def settle(self) -> None:
        """Let everything finish: engines let go, lanes deliver, deadlines pass. Then nothing may be held."""
        for _ in range(10_000):
            if not self.settle_step():
                break
        else:
            raise AssertionError("the world does not come to rest")
        for later_s in (1e6, 60.0):
            self.advance(later_s)
            for _ in range(10_000):
                if not self.settle_step():
                    break
        for node in self.nodes.values():
            stats = node.core.stats()
            assert stats.at_rest, (node.name, stats)
            assert stats.credits_outstanding_bytes == 0
            assert not node.armed
            assert not node.claimed

    def settle_step(self) -> bool:
        """Whatever comes next when nothing goes wrong; False when nothing does."""
        if self.pending or self.to_cut:
            self.tell_pending()
            return True
        for wire in self.wires:
            if not wire.alive:
                self.join_threads(wire)
                return True
            for side in (0, 1):
                if wire.control[side]:
                    self.deliver_control(wire, side)
                    return True
                if wire.unsent[side]:
                    self.send(wire, side, 0)
                    return True
                if wire.flying[side]:
                    self.begin_receive(wire, side, 0, keep_copy=False)
                    return True
        return any(self._settle_node(node) for node in self.nodes.values())

    def _settle_node(self, node: Node) -> bool:
        for ref in node.claimed:
            self.end_receive(node, ref, damaged=False, repeat=False)
            return True
        if node.dials:
            self.answer_dial(node, ok=True)
            return True
        for client in node.clients.values():
            for key, sink in client.sinks.items():
                if sink.ended:
                    self.notice_end(node, client, key)
                    return True
            for key, source in client.sources.items():
                if source.failed is not None or source.slots is not None:
                    self.release(node, client, key)
                    return True
        return False


def flow(transfer: str, generation: int) -> FlowKey:
    return FlowKey(TransferId(transfer), Generation(generation))


def _not_sent(job: SendChunk) -> ev.ChunkSent:
    return ev.ChunkSent(job.lane, job.key, job.chunk, job.out_of, ok=False)


def _received(effect: Effect, lane: LaneId) -> Event:
    match effect:
        case ev.SendPull():
            return ev.PullReceived(lane, effect.key, effect.pull, effect.offer)
        case ev.SendDeclined():
            return ev.DeclinedReceived(lane, effect.key, effect.pull)
        case ev.SendOpened():
            facts = effect.total_bytes, effect.chunk_bytes, effect.manifest
            return ev.OpenedReceived(lane, effect.key, effect.pull, *facts)
        case ev.SendCredit():
            return ev.CreditReceived(lane, effect.key, effect.pull, effect.grants)
        case ev.SendDone():
            return ev.DoneReceived(lane, effect.key, effect.pull)
        case ev.SendAbort():
            return ev.AbortReceived(lane, effect.key, effect.pull, effect.fault)
        case ev.SendRevoke():
            return ev.RevokeReceived(lane, effect.key, effect.pull, effect.fault)
        case ev.SendQuiet():
            return ev.QuietReceived(lane, effect.key, effect.pull)
        case ev.SendFeedback():
            return ev.FeedbackReceived(lane, effect.itl_s, effect.target_s)
        case _:
            raise AssertionError(f"{effect} is no message")
