"""A node's relay as a process: the real service, daemon, sessions and core, and the real client at their other end.

Simulated are the socket between client and daemon (`pipe`) and the lanes (`fabric`).
"""

from __future__ import annotations

import asyncio
import math
import os
from functools import partial
from itertools import count
from pathlib import Path

from isthmus_kvrelay import control
from isthmus_kvrelay.client.relay_client import RelayClient
from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import ClientId, Event, FlowKey
from isthmus_kvrelay.daemon.config import RelayConfig
from isthmus_kvrelay.daemon.relay_daemon import RelayDaemon
from isthmus_kvrelay.daemon.service import RelayService
from isthmus_kvrelay.daemon.session import Session
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_shared.errors import DeadlineExceeded, PartyLost
from isthmus_shared.ids import NodeId
from isthmus_shared.messages.work import RelayRef, WorkerRef
from isthmus_shared.service import ServiceRuntime
from isthmus_sim.bus import SimBus
from isthmus_sim.fabric import Fabric, SimTransport
from isthmus_sim.loop import Life
from isthmus_sim.pipe import PipeEnd, connect
from isthmus_sim.process import Service, World

SLOT_BYTES = 32 * 1024
SECRET = "of one simulation"
CONNECT_S = 5.0
"""As `ISTHMUS_WORKER_RELAY_CONNECT_S`."""


class SimSession(Session):
    def _give_pool(self, transport: asyncio.BaseTransport) -> bool:
        return True  # the client takes it from the daemon: no descriptor passes through a pipe


class SimDaemon(RelayDaemon):
    """The daemon without sockets, under watch: its invariants are checked after every event."""

    def __init__(self, *args: object, fabric: Fabric, life: Life, world: World, **more: object) -> None:
        self.life, self._world = life, world
        self.transport: SimTransport
        self._name = life.name

        def make(*_: object, me: object, pool: SharedPool, emit: object, log: object) -> SimTransport:
            self.transport = SimTransport(fabric, life, self.settings.relay.incarnation, pool, self.take)
            return self.transport

        super().__init__(*args, make=make, **more)  # type: ignore[arg-type]

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        settings = self.settings
        address = await self._transport.start()
        self._ref = RelayRef(node_id=settings.node_id, incarnation=settings.relay.incarnation, address=address)

    def accept(self) -> Session:
        return SimSession(ClientId(next(self._client_numbers)), self)

    def take(self, *events: Event) -> None:
        if not self._stopped:
            self._world.events += len(events)
            super().take(*events)
            self.check_invariants()

    def halt(self) -> None:
        """Its process vanishes, and with it all its connections."""
        self._stopped = True
        self.transport.die()
        for session in list(self._sessions.values()):
            session.abort()

    def _log_closed(self, closed: ev.FlowClosed) -> None:
        code = None if closed.fault is None else closed.fault.code
        self._world.trace.note(self._name, f"{closed.side.value}.closed", key=_short(closed.key), fault=code)

    @property
    def open_keys(self) -> tuple[tuple[ev.Side, FlowKey], ...]:
        return self._core.open_keys

    def problems(self) -> list[str]:
        """What is held although nobody should hold anything."""
        self.check_invariants()
        stats = self.stats()
        found = [f"{side.value} flow {_short(key)}" for side, key in self.open_keys]
        if not stats.at_rest or stats.credits_outstanding_bytes:
            found.append(f"{stats}")
        if len(self.transport.landing):
            found.append(f"{len(self.transport.landing)} landing slots armed")
        return [f"{self._name} has {text}" for text in found]


def _short(key: FlowKey) -> str:
    return f"{key.transfer_id}#{key.generation}"


class SimLink(RelayClient):
    """The client over a pipe."""

    pipe: PipeEnd

    @classmethod
    async def attach(cls, node: Relay, life: Life, worker: WorkerRef) -> SimLink:
        """As `RelayClient.connect`."""
        daemon = node.daemon
        if daemon is None:
            raise PartyLost(f"no relay answers on {node.node_id}")
        fd = os.dup(daemon.pool_fd)
        client = cls(node.world.belfry.of(life))
        client.pipe = connect(client._link, life, daemon.accept(), daemon.life)
        connected = False
        try:
            async with asyncio.timeout(CONNECT_S):
                client._link.write([control.Hello(worker=worker, bell=client._bell.name)])
                welcome = await client._welcome
            client._pool = SharedPool.attach(fd, pool_bytes=welcome.pool_bytes, slot_bytes=welcome.slot_bytes)
            connected = True
        except TimeoutError as error:
            raise DeadlineExceeded(f"the relay of {node.node_id} did not answer within {CONNECT_S:g} s") from error
        finally:
            if not connected:
                client._bell.close()
                client._link.abort()
                os.close(fd)
        client._relay = welcome.relay
        return client

    def crash(self) -> None:
        """Its process vanishes: the kernel closes the connection."""
        self.pipe.abort()


class Relay(Service):
    """A node's relay, over its lives."""

    def __init__(self, world: World, name: str, *, slots: int, bytes_per_s: float = math.inf) -> None:
        """`bytes_per_s`: the ceiling of its lanes."""
        super().__init__(world, name)
        self.node_id, self._slots, self._bytes_per_s = NodeId(name), slots, bytes_per_s
        self.daemon: SimDaemon | None = None
        self._pipes = count(1)

    async def crash(self) -> None:
        daemon, self.daemon = self.daemon, None
        await super().crash()
        if daemon is not None:
            daemon.halt()

    async def _main(self, bus: SimBus, life: Life) -> None:
        config = RelayConfig(
            node_id=self.node_id,
            socket=Path("simulated"),
            secret=SECRET,
            pool_bytes=self._slots * SLOT_BYTES,
            slot_bytes=SLOT_BYTES,
            prefault=False,
            rate_bytes_per_s=0.0 if math.isinf(self._bytes_per_s) else self._bytes_per_s,
            shutdown_grace_s=2.0,
        )
        runtime = ServiceRuntime(
            "kvrelay", config, bus=bus, instance=self.name, incarnation=self.life, serve_http=False
        )
        async with runtime:
            make = partial(SimDaemon, fabric=self.world.fabric, life=life, world=self.world)
            service = RelayService(runtime, make_daemon=make, cpu_s=_no_cpu_s)
            daemon = service.daemon
            assert isinstance(daemon, SimDaemon)
            self.daemon, self.runtime = daemon, runtime
            try:
                await service.run()
            finally:
                if self.daemon is daemon:
                    self.daemon = None


def _no_cpu_s() -> float:
    """No run may depend on how fast this machine is."""
    return 0.0
