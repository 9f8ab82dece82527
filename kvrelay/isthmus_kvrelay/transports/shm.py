"""The node's staging pool as shared memory: mapped by the relay and by every client, with no name on disk.

It is also the transport between a producer and a consumer on one node: the consumer's views are the producer's slots,
so nothing is copied and nothing is sent (the core attaches the two, see `InSide`).
"""

from __future__ import annotations

import fcntl
import mmap
import os

from isthmus_shared.errors import ProtocolViolation

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4
_SEALS = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW
"""Nobody who holds the descriptor can resize the pool: a shrunk one would kill its readers with SIGBUS."""


class SharedPool:
    """`pool_bytes` of anonymous shared memory. Gone with the last process that maps it, however that ends."""

    def __init__(self, fd: int, pool_bytes: int, slot_bytes: int) -> None:
        self._fd = fd
        self.slot_bytes = slot_bytes
        self._map = mmap.mmap(fd, pool_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, *, pool_bytes: int, slot_bytes: int, huge_pages: bool = False) -> SharedPool:
        """With `huge_pages`, `OSError` unless the host has that many reserved."""
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge_pages else 0)
        fd = os.memfd_create("isthmus-staging", flags)
        try:
            os.ftruncate(fd, pool_bytes)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
            return cls(fd, pool_bytes, slot_bytes)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, *, pool_bytes: int, slot_bytes: int) -> SharedPool:
        """Map another process's pool; takes over `fd`, unless it raises `ProtocolViolation`."""
        if os.fstat(fd).st_size != pool_bytes or fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
            raise ProtocolViolation("the descriptor is not the relay's pool")
        return cls(fd, pool_bytes, slot_bytes)

    @property
    def fd(self) -> int:
        return self._fd

    def view(self, slot: int, start_bytes: int, size_bytes: int) -> memoryview:
        """Writable bytes of a slot."""
        assert 0 <= start_bytes <= start_bytes + size_bytes <= self.slot_bytes
        first = slot * self.slot_bytes + start_bytes
        return self._view[first : first + size_bytes]

    def span(self, slot: int, start_bytes: int, size_bytes: int) -> memoryview:
        """Writable bytes from within a slot on, into those after it."""
        first = slot * self.slot_bytes + start_bytes
        assert 0 <= first <= first + size_bytes <= len(self._view)
        return self._view[first : first + size_bytes]

    def close(self) -> None:
        """Give up the descriptor. The mapping goes when the last view of it does. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._view.release()
            try:
                self._map.close()
            except BufferError:
                pass  # an engine still holds a view; the memory is unmapped when it lets go
