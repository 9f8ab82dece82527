"""Where the pool's pages come from: filled in early, of huge pages or of one NUMA node on request."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import threading
from dataclasses import dataclass

from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_shared.errors import ConfigInvalid

_MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later."""
SLICE_BYTES = 64 << 20
"""Filled in at a time, so that a relay that stops meanwhile waits for some ten milliseconds."""
_MPOL_BIND = 2
_MPOL_MF_MOVE = 2
_MBIND = {"x86_64": 237, "aarch64": 235}
MAX_NUMA_NODES = 1_024


@dataclass(frozen=True, slots=True)
class MemorySettings:
    prefault: bool = False
    huge_pages: bool = False
    numa_node: int | None = None


def create_pool(settings: MemorySettings, *, pool_bytes: int, slot_bytes: int) -> SharedPool:
    """Raises `ConfigInvalid`, with what to do, when the host cannot give what is asked for."""
    try:
        pool = SharedPool.create(pool_bytes=pool_bytes, slot_bytes=slot_bytes, huge_pages=settings.huge_pages)
    except OSError as error:
        if settings.huge_pages:
            raise _no_huge_pages(pool_bytes, error) from error
        raise
    if settings.numa_node is not None:
        memory = PoolMemory(pool.fd, pool_bytes)
        try:
            memory.bind(settings.numa_node)
        except ConfigInvalid:
            pool.close()
            raise
        finally:
            memory.close()
    return pool


class PoolMemory:
    """A second mapping of the pool's descriptor, for as long as its pages are being placed."""

    def __init__(self, fd: int, pool_bytes: int) -> None:
        self._map = mmap.mmap(fd, pool_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._bytes = pool_bytes
        first = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(first)
        del first  # the map could not be closed while it lives
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self.stop = False
        """Set from another thread: `prefault` returns after the slice at hand."""

    def bind(self, numa_node: int) -> None:
        """All of the pool's pages on that node, in every process that maps it. Before `prefault`."""
        number = _MBIND.get(platform.machine())
        if number is None:
            raise _no_numa(numa_node, f"unknown on {platform.machine()}")
        if not 0 <= numa_node < MAX_NUMA_NODES:
            raise _no_numa(numa_node, f"nodes are 0 to {MAX_NUMA_NODES - 1}")
        mask = (ctypes.c_ulong * (MAX_NUMA_NODES // 64))()
        mask[numa_node // 64] = 1 << (numa_node % 64)
        arguments = (
            ctypes.c_long(number),
            ctypes.c_void_p(self._address),
            ctypes.c_ulong(self._bytes),
            ctypes.c_int(_MPOL_BIND),
            mask,
            ctypes.c_ulong(MAX_NUMA_NODES + 1),
            ctypes.c_uint(_MPOL_MF_MOVE),
        )
        if self._libc.syscall(*arguments):
            raise _no_numa(numa_node, os.strerror(ctypes.get_errno()))

    def prefault(self) -> None:
        """Give every byte its page. Blocks, without the interpreter's lock; never changes what a page holds."""
        for start in range(0, self._bytes, SLICE_BYTES):
            if self.stop:
                return
            size = min(SLICE_BYTES, self._bytes - start)
            if self._libc.madvise(self._address + start, size, _MADV_POPULATE_WRITE):
                code = ctypes.get_errno()
                if code == errno.EINVAL:
                    return  # an older kernel: pages come with their first use
                raise OSError(code, f"the pool's memory cannot be had: {os.strerror(code)}")

    def close(self) -> None:
        self._map.close()


class Prefault:
    """Fills the pool in from a thread of its own, while the relay already serves."""

    def __init__(self, fd: int, pool_bytes: int) -> None:
        self._memory = PoolMemory(fd, pool_bytes)
        self._thread = threading.Thread(target=self._memory.prefault, name="relay-prefault", daemon=True)
        self._started = False

    def start(self) -> None:
        self._started = True
        self._thread.start()

    def end(self) -> None:
        """Returns when nothing touches the mapping any more. Idempotent."""
        self._memory.stop = True
        if self._started:
            self._thread.join()
        self._memory.close()


def _no_numa(node: int, why: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"the pool cannot be bound to NUMA node {node}",
        why=why,
        todo="see `numactl --hardware`, or leave ISTHMUS_RELAY_NUMA_NODE empty",
        param="numa_node",
    )


def _no_huge_pages(pool_bytes: int, error: OSError) -> ConfigInvalid:
    todo = "reserve them (sysctl vm.nr_hugepages), or unset ISTHMUS_RELAY_HUGE_PAGES"
    if error.errno == errno.EINVAL:
        todo = "make ISTHMUS_RELAY_POOL_BYTES a multiple of the host's huge pages (grep Hugepagesize /proc/meminfo)"
    return ConfigInvalid(
        f"the pool of {pool_bytes} bytes cannot be had in huge pages",
        why=str(error),
        todo=todo,
        param="huge_pages",
    )
