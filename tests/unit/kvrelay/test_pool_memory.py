from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import pytest

from isthmus_kvrelay.daemon.pool_memory import MemorySettings, PoolMemory, Prefault, create_pool
from isthmus_kvrelay.transports.shm import SharedPool
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


NUMA_MAPS = Path("/proc/self/numa_maps")


@pytest.mark.skipif(not NUMA_MAPS.exists(), reason="this kernel knows no NUMA nodes (no /proc/self/numa_maps)")
def test_a_pool_bound_to_a_numa_node_has_its_pages_there() -> None:
    pool = create_pool(MemorySettings(numa_node=0), pool_bytes=POOL_BYTES, slot_bytes=mmap.PAGESIZE)
    pool.view(0, 0, mmap.PAGESIZE)[:] = b"x" * mmap.PAGESIZE
    (mapping,) = [line for line in NUMA_MAPS.read_text().splitlines() if "isthmus-staging" in line]
    assert " bind:0 " in mapping
    assert re.search(r"\bN0=[1-9]", mapping)
    pool.close()


def huge_pages() -> tuple[int, int]:
    """Free ones, and bytes of one."""
    facts = dict(re.findall(r"^(\w+): +(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE))
    return int(facts.get("HugePages_Free", 0)), int(facts.get("Hugepagesize", 2048)) << 10


@pytest.mark.skipif(huge_pages()[0] < 2, reason="this host has no 2 huge pages to spare (sysctl vm.nr_hugepages=2)")
def test_a_pool_in_huge_pages_is_one_like_any_other() -> None:
    free, page_bytes = huge_pages()
    pool = create_pool(MemorySettings(huge_pages=True), pool_bytes=2 * page_bytes, slot_bytes=1 << 20)
    prefault = Prefault(pool.fd, 2 * page_bytes)
    prefault.start()
    prefault.end()
    assert huge_pages()[0] <= free - 2
    attached = SharedPool.attach(os.dup(pool.fd), pool_bytes=2 * page_bytes, slot_bytes=1 << 20)
    pool.view(1, 7, 5)[:] = b"bytes"
    assert bytes(attached.view(1, 7, 5)) == b"bytes"
    attached.close()
    pool.close()


@pytest.mark.skipif(not Path("/sys/kernel/mm/hugepages").is_dir(), reason="this kernel has no huge pages")
def test_a_pool_that_ends_within_a_huge_page_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigInvalid, match="ISTHMUS_RELAY_POOL_BYTES a multiple"):
        create_pool(MemorySettings(huge_pages=True), pool_bytes=3 << 20, slot_bytes=1 << 20)
