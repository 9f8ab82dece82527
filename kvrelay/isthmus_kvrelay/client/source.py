"""The consumer's end of a transfer: waits until all has landed, then read-only views of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from isthmus_kvrelay import control
from isthmus_kvrelay.client.sink import Post, map_range
from isthmus_kvrelay.core.events import FlowKey
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_shared.errors import Cancelled, DeadlineExceeded, Fault, TransferFailed

DEADLINE_GRACE_S = 2.0
"""The relay ends a transfer at its deadline; if its word has not come this much later, the client ends it alone."""


class RelaySource:
    """See `engines.kv_port.KvSource`. `map` and `release` may be called from the engine's thread."""

    def __init__(
        self, key: FlowKey, *, pull: int, total_bytes: int, deadline_s: float, pool: SharedPool, post: Post
    ) -> None:
        self.key, self.pull = key, pull
        self._total_bytes, self._pool, self._post = total_bytes, pool, post
        self.token: bytes | None = None
        """With which its producer rings, if that is on this node."""
        self._loop = asyncio.get_running_loop()
        self._give_up_s = self._loop.time() + deadline_s + DEADLINE_GRACE_S
        self._waiting: set[asyncio.Future[None]] = set()
        self._settled = False
        self._lock = threading.Lock()
        self._slots: Sequence[int] | None = None
        self._chunk_bytes = 0
        self._arrived = False
        self._fault: Fault | None = None
        self._released = False

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    async def ready(self) -> None:
        if not self._settled:
            await self._wait()
        with self._lock:
            if self._fault is not None:
                raise self._fault.to_error()

    async def _wait(self) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        timer = self._loop.call_at(self._give_up_s, self._give_up)
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiting.discard(waiter)

    def _give_up(self) -> None:
        self.fail(DeadlineExceeded("the relay did not say in time whether the transfer arrived").to_fault())

    def map(self, offset_bytes: int, size_bytes: int) -> Sequence[memoryview]:
        with self._lock:
            if self._fault is not None:
                raise TransferFailed("the transfer has ended", why=f"{self._fault.code}: {self._fault.what}")
            assert self._arrived, "map before ready"
            assert self._slots is not None
            slots = self._slots
        views = map_range(self._pool, slots, self._chunk_bytes, self._total_bytes, offset_bytes, size_bytes)
        return [view.toreadonly() for view in views]

    def release(self) -> None:
        with self._lock:
            if self._released:
                return
            self._released = True
            consumed = self._arrived and self._fault is None
            if self._fault is None:
                self._fault = Cancelled("the transfer was released").to_fault()
        self._post(control.ReleaseNotice(**control.names_of(self.key), consumed=consumed))
        try:
            self._loop.call_soon_threadsafe(self._settle)  # a waiting `ready` ends too
        except RuntimeError:
            pass  # the loop is closed: nobody waits

    # --- called on the loop

    def _settle(self) -> None:
        self._settled = True
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    def attached(self, slots: Sequence[int], chunk_bytes: int) -> None:
        """Where the producer, on this node, is filling it."""
        with self._lock:
            self._slots, self._chunk_bytes = slots, chunk_bytes

    def rung(self) -> None:
        """The producer of the attached slots says that all is filled."""
        with self._lock:
            assert self._slots is not None
            self._arrived = self._fault is None
        self._settle()

    def arrived(self, slots: Sequence[int], chunk_bytes: int) -> None:
        with self._lock:
            if self._fault is None:
                self._slots, self._chunk_bytes, self._arrived = slots, chunk_bytes, True
        self._settle()

    def fail(self, fault: Fault) -> None:
        with self._lock:
            self._fault = self._fault or fault
        self._settle()
