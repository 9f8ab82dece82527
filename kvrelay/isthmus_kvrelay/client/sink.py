"""The producer's end of a transfer: writable views of the relay's pool, and what has been filled of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from isthmus_kvrelay import control
from isthmus_kvrelay.core.events import FlowKey
from isthmus_kvrelay.framing import cut
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_shared.errors import Fault, TransferFailed

Post = Callable[[control.ClientMessage], None]


class RelaySink:
    """See `engines.kv_port.KvSink`. Every method may be called from the engine's thread; one thread at a time writes.

    When the transfer ends under the engine's hands, the relay keeps the slots out of use until the engine has come
    back to this object (its next call): only then is it sure that nothing writes into them.
    """

    def __init__(
        self, key: FlowKey, *, total_bytes: int, slots: Sequence[int], chunk_bytes: int, pool: SharedPool, post: Post
    ) -> None:
        """`post` is thread-safe and keeps order."""
        self.key = key
        self._total_bytes, self._slots, self._chunk_bytes = total_bytes, slots, chunk_bytes
        self._pool, self._post = pool, post
        self._lock = threading.Lock()
        self._left = [min(chunk_bytes, total_bytes - chunk * chunk_bytes) for chunk in range(len(slots))]
        self._mapped_bytes = 0
        self._filled_bytes = 0
        self._sealed = False
        self._quiet = False
        self._fault: Fault | None = None
        self._ring: Callable[[], None] | None = None

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def map(self, offset_bytes: int, size_bytes: int) -> Sequence[memoryview]:
        with self._lock:
            self._check_alive()
            if self._sealed:
                raise TransferFailed("the transfer is sealed; its staging may no longer be written")
            views = map_range(self._pool, self._slots, self._chunk_bytes, self._total_bytes, offset_bytes, size_bytes)
            self._mapped_bytes += size_bytes
            return views

    def filled(self, offset_bytes: int, size_bytes: int) -> None:
        """After the transfer's end this does nothing; `map` and `seal` say why it ended."""
        check_range(offset_bytes, size_bytes, self._total_bytes)
        done = []
        with self._lock:
            if self._fault is not None:
                self._be_quiet()
                return
            self._filled_bytes += size_bytes
            while size_bytes:  # mostly one chunk: a small block of many, so what is done here counts
                chunk, start = divmod(offset_bytes, self._chunk_bytes)
                size = min(self._chunk_bytes - start, size_bytes)
                left = self._left[chunk] - size
                assert left >= 0, "bytes were declared filled twice"
                self._left[chunk] = left
                if not left:
                    done.append(chunk)
                offset_bytes += size
                size_bytes -= size
        for start in range(0, len(done), control.MAX_CHUNKS_PER_FRAME):
            packed = control.pack_indices(tuple(done[start : start + control.MAX_CHUNKS_PER_FRAME]))
            self._post(control.FilledNotice(*self.key, packed))

    def seal(self) -> None:
        with self._lock:
            self._check_alive()
            if self._sealed:
                return
            if self._filled_bytes != self._total_bytes:
                missing = self._total_bytes - self._filled_bytes
                raise TransferFailed("the transfer was sealed too early", why=f"{missing} bytes are not filled")
            self._sealed = self._quiet = True
            ring = self._ring
        if ring is not None:
            ring()
        self._post(control.SealNotice(**control.names_of(self.key)))

    def abort(self, fault: Fault) -> None:
        with self._lock:
            if self._sealed:
                return
            if self._fault is None:
                self._fault = fault
                self._post(control.AbortRequest(**control.names_of(self.key), fault=cut(fault)))
            self._be_quiet()

    def attached(self, ring: Callable[[], None]) -> None:
        """The consumer is on this node, and `ring` (thread-safe) tells it directly that all is filled."""
        with self._lock:
            self._ring = ring

    def end(self, fault: Fault | None) -> None:
        """The relay says that the transfer is over. Called on the loop."""
        with self._lock:
            if fault is None or self._sealed:
                return
            self._fault = self._fault or fault
            if self._mapped_bytes <= self._filled_bytes:
                self._be_quiet()

    def _check_alive(self) -> None:
        if self._fault is not None:
            self._be_quiet()
            raise TransferFailed("the transfer has ended", why=f"{self._fault.code}: {self._fault.what}")

    def _be_quiet(self) -> None:
        if not self._quiet:
            self._quiet = True
            self._post(control.SinkQuietNotice(**control.names_of(self.key)))


def check_range(offset_bytes: int, size_bytes: int, total_bytes: int) -> None:
    if not 0 <= offset_bytes <= offset_bytes + size_bytes <= total_bytes:
        raise ValueError(f"[{offset_bytes}, {offset_bytes + size_bytes}) lies outside a flow of {total_bytes} bytes")


def pieces(offset_bytes: int, size_bytes: int, chunk_bytes: int) -> list[tuple[int, int, int]]:
    """(chunk, first byte within it, bytes) of every chunk that a range of a flow touches."""
    found, end = [], offset_bytes + size_bytes
    while offset_bytes < end:
        chunk, start = divmod(offset_bytes, chunk_bytes)
        size = min(chunk_bytes - start, end - offset_bytes)
        found.append((chunk, start, size))
        offset_bytes += size
    return found


def map_range(
    pool: SharedPool, slots: Sequence[int], chunk_bytes: int, total_bytes: int, offset_bytes: int, size_bytes: int
) -> list[memoryview]:
    """One view for each run of slots that lie side by side: few and large ones, however many chunks there are."""
    check_range(offset_bytes, size_bytes, total_bytes)
    runs: list[tuple[int, int, int]] = []
    for chunk, start, size in pieces(offset_bytes, size_bytes, chunk_bytes):
        if runs:
            slot, first, done = runs[-1]
            if (slot * pool.slot_bytes + first + done) == slots[chunk] * pool.slot_bytes + start:
                runs[-1] = (slot, first, done + size)
                continue
        runs.append((slots[chunk], start, size))
    return [pool.span(*run) for run in runs]
