"""A node's relay in virtual time: the real core behind a shell without sockets, and the link that a worker gets.

The producer's and the consumer's ends are the real client's (`RelaySink`, `RelaySource`); only the connection between
them and the core is simulated.
"""

from __future__ import annotations

import asyncio
import hashlib
from itertools import count

from isthmus_kvrelay import control
from isthmus_kvrelay.client.sink import RelaySink
from isthmus_kvrelay.client.source import RelaySource
from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import ClientId, Event, FlowKey
from isthmus_kvrelay.core.ledger import RelaySettings
from isthmus_kvrelay.core.relay import RelayCore
from isthmus_kvrelay.transports.landing import LandingTable
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_shared.engines.kv_port import KvSink, KvSource
from isthmus_shared.errors import Cancelled, Fault, IsthmusError, PartyLost
from isthmus_shared.ids import Generation, Incarnation, NodeId, TransferId
from isthmus_shared.kv.manifest import KvManifest
from isthmus_shared.messages.work import KvTicket, RelayRef, WorkerRef
from isthmus_sim.fabric import Fabric
from isthmus_sim.trace import Trace


class SimRelay:
    """One life of one node's relay."""

    def __init__(self, fabric: Fabric, trace: Trace, node: NodeId, life: int, *, slots: int, slot_bytes: int) -> None:
        self.incarnation = Incarnation(f"relay-{node}-life{life}")
        self.ref = RelayRef(node_id=node, incarnation=self.incarnation, address=f"{node}:{life}")
        self.pool = SharedPool.create(pool_bytes=slots * slot_bytes, slot_bytes=slot_bytes)
        self.landing = LandingTable(self.pool)
        self.open: dict[tuple[ev.Side, FlowKey], float] = {}
        """Flows that have been asked for and not closed, and since when."""
        self.alive = True
        self._core = RelayCore(
            RelaySettings(incarnation=self.incarnation, slot_bytes=slot_bytes, total_slots=slots, out_share=0.5)
        )
        self._fabric, self._trace = fabric, trace
        self._loop = asyncio.get_running_loop()
        self._links: dict[ClientId, SimLink] = {}
        self._clients = count(1)
        self._timer: asyncio.TimerHandle | None = None
        fabric.relays[self.incarnation] = self

    def connect(self, worker: WorkerRef) -> SimLink:
        link = SimLink(self, ClientId(next(self._clients)), worker)
        self._links[link.client] = link
        self.take(ev.ClientUp(link.client))
        return link

    def leave(self, link: SimLink) -> None:
        """The client's connection is closed."""
        if self._links.pop(link.client, None) is not None:
            self.take(ev.ClientDown(link.client))

    def die(self) -> None:
        """At once, with all its lanes and clients' connections."""
        self.alive = False
        del self._fabric.relays[self.incarnation]
        if self._timer is not None:
            self._timer.cancel()
        self._fabric.cut(self)
        for link in self._links.values():
            link.gone(PartyLost("the node's relay is gone"))
        self._links.clear()
        self.pool.close()

    def problems(self) -> list[str]:
        """What is held although nobody should hold anything."""
        self._core.check_invariants()
        stats = self._core.stats()
        found = [f"{side.value} flow {key} since {at_s:.3f} s" for (side, key), at_s in self.open.items()]
        if not stats.at_rest or stats.credits_outstanding_bytes:
            found.append(f"{stats}")
        if len(self.landing):
            found.append(f"{len(self.landing)} landing slots armed")
        return [f"{self.incarnation}: {text}" for text in found]

    def take(self, event: Event) -> None:
        if not self.alive:
            return
        if isinstance(event, ev.OpenSink | ev.OpenSource):
            side = ev.Side.OUT if isinstance(event, ev.OpenSink) else ev.Side.IN
            self._trace.note(self.incarnation, f"{side.value}.asked", key=event.key, total_bytes=event.total_bytes)
        for effect in self._core.handle(event, now_s=self._loop.time()):
            self._carry_out(effect)
        if isinstance(event, ev.OpenSink | ev.OpenSource) and self._core.open_flows > len(self.open):
            self.open[side, event.key] = self._loop.time()
        self._core.check_invariants()
        self._arm()

    def _carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.SinkOpened() | ev.SinkEnded() | ev.SourceReady() | ev.SourceFailed():
                link = self._links.get(effect.client)
                if link is not None:
                    self._loop.call_soon(link.take, effect)
            case ev.Attached():
                self._introduce(effect)
            case ev.CloseClient():
                raise AssertionError(f"the relay refuses its client: {effect.fault}")
            case ev.FlowClosed():
                self.open.pop((effect.side, effect.key), None)
                code = None if effect.fault is None else effect.fault.code
                self._trace.note(self.incarnation, f"{effect.side.value}.closed", key=effect.key, fault=code)
            case _:
                self._fabric.carry_out(self, effect)

    def _introduce(self, effect: ev.Attached) -> None:
        producer, consumer = self._links.get(effect.producer), self._links.get(effect.consumer)
        if producer is not None and consumer is not None:
            self._loop.call_soon(consumer.attach_source, effect)
            self._loop.call_soon(producer.attach_sink, effect, consumer)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        at_s = self._core.next_deadline_s()
        self._timer = None if at_s is None else self._loop.call_at(at_s, self.take, ev.Tick())


class SimLink:
    """A worker's `RelayLink`. A `dead` one is a crashed worker's: nothing it still does is heard."""

    def __init__(self, relay: SimRelay, client: ClientId, worker: WorkerRef) -> None:
        self.client, self.worker = client, worker
        self.lost = asyncio.Event()
        self.dead = False
        self._home = relay
        self._loop = asyncio.get_running_loop()
        self._opening: dict[FlowKey, tuple[int, asyncio.Future[RelaySink]]] = {}
        self._sinks: dict[FlowKey, RelaySink] = {}
        self._sources: dict[FlowKey, RelaySource] = {}

    @property
    def relay(self) -> RelayRef:
        return self._home.ref

    async def open_sink(
        self,
        transfer_id: TransferId,
        generation: Generation,
        manifest: KvManifest,
        *,
        deadline_s: float,
        wait_s: float,
        retain_s: float = 0.0,
    ) -> KvSink:
        self._check()
        key, total = FlowKey(transfer_id, generation), manifest.total_bytes
        opened: asyncio.Future[RelaySink] = self._loop.create_future()
        self._opening[key] = total, opened
        self._say(ev.OpenSink(self.client, key, total, _digest(manifest), deadline_s, wait_s, retain_s))
        try:
            return await opened
        except asyncio.CancelledError:
            fault = Cancelled("the producer no longer wants the sink").to_fault()
            self._say(ev.AbortByClient(self.client, key, fault))
            self._say(ev.SinkQuiet(self.client, key))
            raise
        finally:
            self._opening.pop(key, None)

    async def open_source(self, ticket: KvTicket, *, deadline_s: float) -> KvSource:
        self._check()
        key, total = FlowKey(ticket.transfer_id, ticket.generation), ticket.manifest.total_bytes
        pool, pull = self._home.pool, ticket.pull
        source = RelaySource(key, pull=pull, total_bytes=total, deadline_s=deadline_s, pool=pool, post=self._post)
        self._sources[key] = source
        peer, tokens = ticket.source, ticket.manifest.prompt_tokens
        facts = peer.incarnation, peer.address, total, _digest(ticket.manifest), deadline_s, pull, tokens
        self._say(ev.OpenSource(self.client, key, *facts))
        return source

    def report_step(self, *, step_s: float, kv_blocks_free: int, kv_block_tokens: int) -> None:
        self._say(ev.StepReported(self.client, step_s, kv_blocks_free, kv_block_tokens))

    def report_itl(self, itl_ms: float, target_ms: float) -> None:
        self._say(ev.ItlReported(self.client, itl_ms / 1e3, target_ms / 1e3))

    async def abort(self, transfer_id: TransferId, generation: Generation, fault: Fault) -> None:
        self._say(ev.AbortByClient(self.client, FlowKey(transfer_id, generation), fault))

    async def close(self) -> None:
        if not self.dead and not self.lost.is_set():
            self._loop.call_soon(self._home.leave, self)  # after the frames before it
        self.gone(PartyLost("the client was closed"))

    def crash(self) -> None:
        """Its process vanishes."""
        self.dead = True
        self._home.leave(self)
        self.gone(PartyLost("this process is dead"))

    def gone(self, error: IsthmusError) -> None:
        """The connection is over: everything open fails."""
        for _, opened in self._opening.values():
            if not opened.done():
                opened.set_exception(error)
        for sink in list(self._sinks.values()):
            sink.end(error.to_fault())
        for source in list(self._sources.values()):
            source.fail(error.to_fault())
        self.lost.set()

    def take(self, effect: ev.SinkOpened | ev.SinkEnded | ev.SourceReady | ev.SourceFailed) -> None:
        if self.dead or self.lost.is_set():
            return
        key = effect.key
        match effect:
            case ev.SinkOpened():
                self._sink_opened(effect)
            case ev.SinkEnded() if key in self._sinks:
                self._sinks[key].end(effect.fault)
            case ev.SinkEnded() if key in self._opening and effect.fault is not None:
                if not self._opening[key][1].done():
                    self._opening[key][1].set_exception(effect.fault.to_error())
            case ev.SourceReady() if key in self._sources and self._sources[key].pull == effect.pull:
                self._sources[key].arrived(effect.slots, effect.chunk_bytes)
            case ev.SourceFailed() if key in self._sources and self._sources[key].pull == effect.pull:
                self._sources[key].fail(effect.fault)
            case _:
                pass  # its own end had crossed the relay's word

    def attach_source(self, effect: ev.Attached) -> None:
        source = self._sources.get(effect.key)
        if source is not None and source.pull == effect.pull:
            source.attached(effect.slots, effect.chunk_bytes)
            source.token = b"told"

    def attach_sink(self, effect: ev.Attached, consumer: SimLink) -> None:
        sink = self._sinks.get(effect.key)
        if sink is not None and not self.dead:
            sink.attached(lambda: self._ring(consumer, effect))

    def _ring(self, consumer: SimLink, effect: ev.Attached) -> None:
        if not self.dead:
            self._loop.call_soon(consumer.rung, effect)

    def rung(self, effect: ev.Attached) -> None:
        source = self._sources.get(effect.key)
        if not self.dead and source is not None and source.pull == effect.pull and source.token is not None:
            source.rung()

    def _sink_opened(self, effect: ev.SinkOpened) -> None:
        total, opened = self._opening.get(effect.key, (0, None))
        if opened is None or opened.done():
            return  # given up meanwhile; the abort is on its way
        sink = RelaySink(
            effect.key,
            total_bytes=total,
            slots=effect.slots,
            chunk_bytes=effect.chunk_bytes,
            pool=self._home.pool,
            post=self._post,
        )
        self._sinks[effect.key] = sink
        opened.set_result(sink)

    def _check(self) -> None:
        if self.dead or self.lost.is_set():
            raise PartyLost("this node's relay is gone", todo="serve aggregated until it is back")

    def _post(self, message: control.ClientMessage) -> None:
        match message:
            case control.FilledNotice():
                self._say(ev.ChunksFilled(self.client, message.key, control.unpack_indices(message.chunks)))
            case control.SealNotice():
                self._sinks.pop(message.key, None)
                self._say(ev.SealSink(self.client, message.key))
            case control.SinkQuietNotice():
                self._sinks.pop(message.key, None)
                self._say(ev.SinkQuiet(self.client, message.key))
            case control.ReleaseNotice():
                self._sources.pop(message.key, None)
                self._say(ev.ReleaseSource(self.client, message.key, message.consumed))
            case control.AbortRequest():
                self._say(ev.AbortByClient(self.client, message.key, message.fault))
            case _:
                raise AssertionError(f"sinks and sources do not send {message.kind}")

    def _say(self, event: Event) -> None:
        """One frame on its way; ready callbacks run in order, so the order of frames is kept."""
        if not self.dead and not self.lost.is_set():
            self._loop.call_soon(self._heard, event)

    def _heard(self, event: Event) -> None:
        if not self.dead:
            self._home.take(event)


def _digest(manifest: KvManifest) -> str:
    return hashlib.blake2b(manifest.model_dump_json().encode(), digest_size=16).hexdigest()
