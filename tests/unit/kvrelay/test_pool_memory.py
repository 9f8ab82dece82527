from __future__ import annotations

import mmap
import os

import pytest

from isthmus_kvrelay.daemon.pool_memory import MemorySettings, PoolMemory, Prefault, create_pool
from isthmus_shared.errors import ConfigInvalid

POOL_BYTES = 1 << 20


def resident_bytes(fd: int) -> int:
    """What the pool's descriptor has been given of the host's memory."""
    return os.fstat(fd).st_blocks * 512


def test_prefault_gives_every_byte_its_page_and_changes_none() -> None:
    pool = create_pool(MemorySettings(), pool_bytes=POOL_BYTES, slot_bytes=mmap.PAGESIZE)
    pool.view(3, 0, 5)[:] = b"bytes"
    assert resident_bytes(pool.fd) < POOL_BYTES
    prefault = Prefault(pool.fd, POOL_BYTES)
    prefault.start()
    prefault.end()
    prefault.end()
    assert resident_bytes(pool.fd) == POOL_BYTES
    assert bytes(pool.view(3, 0, 5)) == b"bytes"
    pool.close()


def test_a_prefault_that_is_told_to_stop_does_nothing_more() -> None:
    pool = create_pool(MemorySettings(), pool_bytes=POOL_BYTES, slot_bytes=mmap.PAGESIZE)
    memory = PoolMemory(pool.fd, POOL_BYTES)
    memory.stop = True
    memory.prefault()
    assert resident_bytes(pool.fd) < POOL_BYTES
    memory.close()
    pool.close()


def test_a_numa_node_that_is_not_there_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigInvalid, match="ISTHMUS_RELAY_NUMA_NODE"):
        create_pool(MemorySettings(numa_node=1_000), pool_bytes=POOL_BYTES, slot_bytes=mmap.PAGESIZE)


def test_huge_pages_that_the_host_has_not_reserved_are_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigInvalid, match=r"vm\.nr_hugepages"):
        create_pool(MemorySettings(huge_pages=True), pool_bytes=1 << 46, slot_bytes=mmap.PAGESIZE)
