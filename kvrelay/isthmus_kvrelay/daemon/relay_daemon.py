"""The relay on its own: pool, core, clients' socket, transport. Knows no bus; `daemon.service` puts it on one."""

from __future__ import annotations

import asyncio
import gc
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

from structlog.typing import FilteringBoundLogger

from isthmus_kvrelay import control
from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import ClientId, Effect, Event
from isthmus_kvrelay.core.ledger import RelaySettings
from isthmus_kvrelay.core.relay import RelayCore, RelayStats
from isthmus_kvrelay.daemon.pool_memory import MemorySettings, Prefault, create_pool
from isthmus_kvrelay.daemon.session import Session
from isthmus_kvrelay.daemon.sockets import inode_of, listen_at
from isthmus_kvrelay.transports.choice import TransportSettings, make_transport
from isthmus_kvrelay.transports.handshake import Identity
from isthmus_kvrelay.transports.port import CountedTransport, Emit
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_shared.errors import Draining, IsthmusError
from isthmus_shared.ids import NodeId
from isthmus_shared.messages.work import RelayRef, WorkerRef


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    node_id: NodeId
    socket: Path
    secret: bytes
    relay: RelaySettings
    transport: TransportSettings
    memory: MemorySettings = field(default_factory=MemorySettings)


class MakeTransport(Protocol):
    def __call__(
        self, settings: TransportSettings, *, me: Identity, pool: SharedPool, emit: Emit, log: FilteringBoundLogger
    ) -> CountedTransport: ...


class RelayDaemon:
    """Start, then `ref` tells others where it is. One per node; runs on the loop that started it."""

    def __init__(
        self,
        settings: DaemonSettings,
        *,
        log: FilteringBoundLogger,
        on_client_lost: Callable[[WorkerRef, str], None],
        on_flow_closed: Callable[[ev.FlowClosed], None],
        make: MakeTransport = make_transport,
    ) -> None:
        """`on_client_lost`: a client has vanished without a goodbye; called on the loop, must not block."""
        self.settings = settings
        self._log = log
        self._on_client_lost, self._on_flow_closed = on_client_lost, on_flow_closed
        relay = settings.relay
        self._core = RelayCore(relay, carry_out=self._carry_out)
        pool_bytes = relay.total_slots * relay.slot_bytes
        self._pool = create_pool(settings.memory, pool_bytes=pool_bytes, slot_bytes=relay.slot_bytes)
        self._prefault = Prefault(self._pool.fd, pool_bytes) if settings.memory.prefault else None
        me = Identity(relay.incarnation, settings.secret)
        self._transport = make(settings.transport, me=me, pool=self._pool, emit=self.take, log=log)
        self._client_numbers = count(1)
        self._sessions: dict[ClientId, Session] = {}
        self._server: asyncio.Server | None = None
        self._socket_inode: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s: float | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._ref: RelayRef | None = None
        self._stopped = False

    # --- life

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._prefault is not None:
            self._prefault.start()
        listener = listen_at(self.settings.socket)
        self._socket_inode = inode_of(self.settings.socket)
        try:
            address = await self._transport.start()
        except BaseException:
            listener.close()
            raise
        node, life = self.settings.node_id, self.settings.relay.incarnation
        self._ref = RelayRef(node_id=node, incarnation=life, address=address)
        self._server = await self._loop.create_unix_server(self._new_session, sock=listener)
        self._log.info("relay.ready", address=address, socket=str(self.settings.socket))
        gc.collect()
        gc.freeze()  # what is here now stays for life: no collection during a transfer need look at it

    async def drain(self, timeout_s: float) -> None:
        """No new sinks; returns when no flow is open any more, or after `timeout_s`."""
        self.take(ev.Drain())
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            stats = self.stats()
            self._log.warning("relay.drain_timed_out", flows_out=stats.flows_out, flows_in=stats.flows_in)

    async def watch(self) -> None:
        """Returns when it is stopped; raises what a bug has raised in the transport."""
        await self._transport.watch()

    async def stop(self) -> None:
        """Close everything. Clients are told; what is still open ends for peers when their lanes close."""
        if self._server is not None:
            self._server.close()
        if self._socket_inode is not None and inode_of(self.settings.socket) == self._socket_inode:
            self.settings.socket.unlink()
        self._socket_inode = None
        for session in list(self._sessions.values()):
            session.said_bye = True  # we leave it, not it us
            session.close(Draining("the relay is stopping"))
        await self._transport.close()
        if self._prefault is not None:
            await asyncio.to_thread(self._prefault.end)
        self._stopped = True
        for session in list(self._sessions.values()):
            session.abort()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._pool.close()

    @property
    def ref(self) -> RelayRef:
        assert self._ref is not None, "not started"
        return self._ref

    @property
    def uncredited_chunks(self) -> int:
        return self._transport.uncredited_chunks

    @property
    def settled(self) -> bool:
        """Chunks move as they will from now on: nothing is being compiled any more. For measurements."""
        return self._transport.loading.settled

    def stats(self) -> RelayStats:
        return self._core.stats()

    def take_chunk_times(self) -> tuple[list[float], list[float]]:
        """See `RelayCore.take_chunk_times`."""
        return self._core.take_chunk_times()

    def clients(self) -> tuple[WorkerRef, ...]:
        """Who is attached, each once."""
        return tuple(dict.fromkeys(s.worker for s in self._sessions.values() if s.worker is not None))

    def check_invariants(self) -> None:
        self._core.check_invariants()

    # --- clients (`session.Host`)

    @property
    def pool_fd(self) -> int:
        return self._pool.fd

    @property
    def welcome(self) -> control.Welcome:
        relay = self.settings.relay
        pool_bytes = relay.total_slots * relay.slot_bytes
        return control.Welcome(relay=self.ref, pool_bytes=pool_bytes, slot_bytes=relay.slot_bytes)

    def _new_session(self) -> Session:
        return Session(ClientId(next(self._client_numbers)), self)

    def joined(self, session: Session) -> None:
        self._sessions[session.client] = session
        self._log.info("client.joined", client=session.client, worker=session.worker)
        self.take(ev.ClientUp(session.client))

    def left(self, session: Session, why: str) -> None:
        if self._sessions.pop(session.client, None) is None:
            return
        worker = session.worker
        assert worker is not None
        self._log.info("client.left", client=session.client, worker=worker, why=why, bye=session.said_bye)
        self.take(ev.ClientDown(session.client))
        if not session.said_bye and worker not in self.clients():
            self._on_client_lost(worker, why)

    # --- the core's shell

    def take(self, *events: Event) -> None:
        if self._stopped:
            return
        self._core.handle(*events, now_s=self._loop.time())
        self._arm_timer()
        if self._core.open_flows:
            self._idle.clear()
        else:
            self._idle.set()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case ev.SinkOpened() | ev.SinkEnded() | ev.SourceReady() | ev.SourceFailed():
                session = self._sessions.get(effect.client)
                if session is not None:
                    session.send(effect)
            case ev.Attached():
                self._introduce(effect)
            case ev.SendChunk():
                self._transport.send_chunk(effect)
            case ev.ExpectChunk():
                self._transport.expect(effect)
            case ev.RevokeFlow():
                self._transport.revoke(effect)
            case ev.Dial():
                self._transport.dial(effect)
            case ev.CloseLane():
                self._transport.close_lane(effect)
            case ev.CloseClient():
                session = self._sessions.get(effect.client)
                if session is not None:
                    session.close(effect.fault.to_error())
            case ev.FlowClosed():
                self._log_closed(effect)
                self._on_flow_closed(effect)
            case _:
                self._transport.send(effect)

    def _introduce(self, effect: ev.Attached) -> None:
        """The consumer first, so that it mostly knows the token before it is rung."""
        producer, consumer = self._sessions.get(effect.producer), self._sessions.get(effect.consumer)
        token = secrets.token_bytes(control.TOKEN_BYTES)
        if consumer is not None:
            consumer.attach_source(effect, token)
            if producer is not None and consumer.bell:
                producer.attach_sink(effect.key, consumer.bell, token)

    def _log_closed(self, closed: ev.FlowClosed) -> None:
        facts = {"transfer_id": closed.key.transfer_id, "generation": closed.key.generation, "side": closed.side.value}
        if closed.fault is None:
            self._log.info("transfer.completed", **facts, kv_bytes=closed.total_bytes, took_s=round(closed.took_s, 6))
        else:
            error: IsthmusError = closed.fault.to_error()
            self._log.warning("transfer.failed", **facts, code=error.code, error=error.text)

    def _arm_timer(self) -> None:
        """A timer that is due too early stays, since what it waited for is mostly gone again soon; it is set anew
        when it goes off."""
        at_s = self._core.next_deadline_s()
        if at_s is None or (self._timer_at_s is not None and self._timer_at_s <= at_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_s = at_s
        self._timer = self._loop.call_at(at_s, self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_at_s = None, None
        self.take(ev.Tick())
