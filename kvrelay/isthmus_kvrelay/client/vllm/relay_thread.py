"""The relay's client on a thread and event loop of its own, so that an engine without either can use it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import uvloop

from isthmus_kvrelay.client.relay_client import RelayClient
from isthmus_shared.engines.kv_port import KvSink, KvSource
from isthmus_shared.errors import Fault, IsthmusError, PartyLost
from isthmus_shared.ids import Generation, Incarnation, NodeId, TransferId
from isthmus_shared.kv.manifest import KvManifest
from isthmus_shared.messages.work import KvTicket, RelayRef, WorkerRef

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 2.0
"""A relay that restarts is back within a second or so; two seconds keep the socket quiet while it is not."""
STOP_S = 5.0
"""For the loop to end its tasks and leave the relay; it takes milliseconds unless the relay hangs."""


WORKER = RelayRef(node_id=NodeId("worker"), incarnation=Incarnation("worker"), address="worker")
"""Stands for a relay where the Isthmus worker opens all flows."""


class RelayPort(Protocol):
    """What the connector asks of a relay; for its loop."""

    async def open_sink(
        self, transfer_id: TransferId, generation: Generation, manifest: KvManifest, *, deadline_s: float, wait_s: float
    ) -> KvSink: ...

    async def open_source(self, ticket: KvTicket, *, deadline_s: float) -> KvSource: ...

    async def abort(self, transfer_id: TransferId, generation: Generation, fault: Fault) -> None: ...


class RelayThread:
    """Keeps one connection to the node's relay, made again when it is lost. `start`, then `stop`."""

    def __init__(self, socket_path: str | None, worker: WorkerRef, log: Callable[[str], None]) -> None:
        """Without a socket nothing is connected: what `use` is given stands for the relay."""
        self._socket_path, self._worker, self._log = socket_path, worker, log
        self._given: RelayPort | None = None
        self._loop = uvloop.new_event_loop()
        self._client: RelayClient | None = None
        self._attached: asyncio.Event | None = None
        self._ever_attached = threading.Event()
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="isthmus-relay", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._started.wait()

    def stop(self) -> None:
        """Leaves the relay; what is under way here is cancelled. Idempotent."""
        if not self._thread.is_alive():
            return
        assert self._stop is not None
        with contextlib.suppress(RuntimeError):  # the loop ended just now
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(STOP_S)

    def use(self, relay: RelayPort) -> None:
        """Before the first flow."""
        assert self._socket_path is None, "one relay or the other"
        self._given = relay

    @property
    def relay(self) -> RelayRef | None:
        """This node's relay, if it is there now. From any thread."""
        if self._socket_path is None:
            return WORKER
        client = self._client
        return None if client is None or client.lost.is_set() else client.relay

    def wait_attached(self, timeout_s: float) -> bool:
        """Until it is connected for the first time. From any thread but the loop's."""
        return self._ever_attached.wait(timeout_s)

    def require(self) -> RelayPort:
        """The connection, or `PartyLost` when there is none now. For the loop."""
        if self._given is not None:
            return self._given
        client = self._client
        if client is None or client.lost.is_set():
            raise PartyLost(f"no relay answers at {self._socket_path}", todo="start this node's relay")
        return client

    def post(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start `work()` on the loop and come back at once. From any thread; after `stop` nothing happens."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._spawn, work)

    def call(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop; for tests and tools."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._started.set()
        keeping = self._loop.create_task(self._keep_attached(self._socket_path))
        await self._stop.wait()
        for task in (keeping, *self._tasks):
            task.cancel()
        await asyncio.gather(keeping, *self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    async def _keep_attached(self, socket_path: str | None) -> None:
        backoff_s = BACKOFF_MIN_S
        if socket_path is None:
            return
        while True:
            try:
                client = await RelayClient.connect(socket_path, worker=self._worker, timeout_s=CONNECT_TIMEOUT_S)
            except IsthmusError as error:
                self._log(f"no relay yet: {error.text}; next try in {backoff_s:.2f} s")
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
                continue
            self._client, backoff_s = client, BACKOFF_MIN_S
            self._ever_attached.set()
            await client.lost.wait()
            self._log("the relay was lost")
            self._client = None
            await client.close()
