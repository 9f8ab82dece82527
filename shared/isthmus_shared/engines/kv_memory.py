"""KV transfers inside one process: sinks and sources over plain memory, with faults on demand. For tests and demos.

Memory comes in slots of `slot_bytes`, as a relay's does, so that a range may be several views.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from isthmus_shared.errors import Fault, TransferFailed


class MemoryKvTransfer:
    """Both ends of one transfer. It is over once sealed and released, or aborted."""

    def __init__(self, total_bytes: int, *, slot_bytes: int = 4096) -> None:
        self.total_bytes = total_bytes
        self._slot_bytes = slot_bytes
        self._data = bytearray(total_bytes)
        self._filled = bytearray(total_bytes)
        self._lock = threading.Lock()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._fail_at_bytes: int | None = None
        self.filled_bytes = 0
        self.fault: Fault | None = None
        self.sealed = False
        self.released = False
        self.sink = MemoryKvSink(self)
        self.source = MemoryKvSource(self)

    def fail_sink_at(self, filled_bytes: int) -> None:
        """The producer's end fails once that many bytes are filled."""
        self._fail_at_bytes = filled_bytes

    def corrupt(self, offset_bytes: int) -> None:
        """Flip a byte that no checksum saw."""
        self._data[offset_bytes] ^= 0xFF

    def fail(self, fault: Fault) -> None:
        with self._lock:
            if not self.sealed and self.fault is None:
                self.fault = fault
        self._notify()

    def views(self, offset_bytes: int, size_bytes: int) -> list[memoryview]:
        end = offset_bytes + size_bytes
        if not 0 <= offset_bytes <= end <= self.total_bytes:
            raise TransferFailed(f"bytes {offset_bytes} to {end} of a transfer of {self.total_bytes}")
        whole, views, at = memoryview(self._data), [], offset_bytes
        while at < end:
            stop = min(end, (at // self._slot_bytes + 1) * self._slot_bytes)
            views.append(whole[at:stop])
            at = stop
        return views

    def fill(self, offset_bytes: int, size_bytes: int) -> None:
        self.require_open()
        end = offset_bytes + size_bytes
        if any(self._filled[offset_bytes:end]):
            raise TransferFailed(f"bytes {offset_bytes} to {end} were filled twice")
        self._filled[offset_bytes:end] = b"\x01" * size_bytes
        self.filled_bytes += size_bytes

    def seal(self) -> None:
        self.require_open()
        if self.filled_bytes != self.total_bytes:
            raise TransferFailed(f"sealed with {self.filled_bytes} of {self.total_bytes} bytes")
        self.sealed = True
        self._notify()

    def require_open(self) -> None:
        if self._fail_at_bytes is not None and self.filled_bytes >= self._fail_at_bytes and self.fault is None:
            self.fault = TransferFailed("the relay was lost", why="injected").to_fault()
        if self.fault is not None:
            raise self.fault.to_error()
        if self.sealed:
            raise TransferFailed("the transfer is sealed")

    async def ended(self) -> None:
        """Until it is sealed or has failed."""
        event = asyncio.Event()
        with self._lock:
            self._waiters.append((asyncio.get_running_loop(), event))
            if self.sealed or self.fault is not None:
                event.set()
        await event.wait()

    def _notify(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for loop, event in waiters:
            loop.call_soon_threadsafe(event.set)


class MemoryKvSink:
    def __init__(self, transfer: MemoryKvTransfer) -> None:
        self._transfer = transfer

    @property
    def total_bytes(self) -> int:
        return self._transfer.total_bytes

    def map(self, offset_bytes: int, size_bytes: int) -> Sequence[memoryview]:
        self._transfer.require_open()
        return self._transfer.views(offset_bytes, size_bytes)

    def filled(self, offset_bytes: int, size_bytes: int) -> None:
        self._transfer.fill(offset_bytes, size_bytes)

    def seal(self) -> None:
        self._transfer.seal()

    def abort(self, fault: Fault) -> None:
        self._transfer.fail(fault)


class MemoryKvSource:
    def __init__(self, transfer: MemoryKvTransfer) -> None:
        self._transfer = transfer

    @property
    def total_bytes(self) -> int:
        return self._transfer.total_bytes

    async def ready(self) -> None:
        await self._transfer.ended()
        if self._transfer.fault is not None:
            raise self._transfer.fault.to_error()

    def map(self, offset_bytes: int, size_bytes: int) -> Sequence[memoryview]:
        if not self._transfer.sealed or self._transfer.released:
            raise TransferFailed("the transfer's bytes are not there", why="before ready or after release")
        return [view.toreadonly() for view in self._transfer.views(offset_bytes, size_bytes)]

    def release(self) -> None:
        self._transfer.released = True
