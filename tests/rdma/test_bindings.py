"""What each binding must do, and how each fault of a reliable connection looks through it."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from isthmus_kvrelay.transports.verbs.binding import (
    Completion,
    Depths,
    Device,
    PathSettings,
    QpAddress,
    QueuePair,
    Region,
    Status,
    Write,
)
from isthmus_kvrelay.transports.verbs.gids import rank_gids, read_gids
from isthmus_kvrelay.transports.verbs.memory import address_of
from isthmus_testing.rdma import require_devices

require_devices()

SIZE = 1 << 16
DEPTHS = Depths(send=32, receive=16)
IMPATIENT = PathSettings(timeout=12, retries=3, rnr_retries=2)


@dataclass
class End:
    device: Device
    memory: memoryview
    region: Region
    qp: QueuePair
    address: int
    seen: list[Completion]

    def poll(self) -> list[Completion]:
        self.seen += self.qp.completions()
        return self.seen

    async def completed(self, count: int) -> list[Completion]:
        """As many completions, waiting for the channel's descriptor like the relay does."""
        loop, more = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.qp.fd, more.set)
        try:
            async with asyncio.timeout(20):
                while len(self.poll()) < count:
                    more.clear()
                    await more.wait()
        finally:
            loop.remove_reader(self.qp.fd)
        return self.seen

    def facts(self, name: str) -> QpAddress:
        port, gid = self.device.port(), rank_gids(read_gids(name))[0]
        return QpAddress(self.qp.number, 7, gid.address.packed, port.lid, port.mtu)

    def write(self, to: End, wr_id: int = 0, size: int = SIZE, **changes: Any) -> Write:
        given: dict[str, Any] = {"remote_address": to.address, "rkey": to.region.rkey, "imm": None, "signaled": True}
        return Write(wr_id, self.address, size, self.region.lkey, **(given | changes))


@contextlib.contextmanager
def end_at(fabric: Any, name: str) -> Iterator[End]:
    device = fabric.load().open(name)
    memory = memoryview(mmap.mmap(-1, SIZE))
    region = device.register(address_of(memory), SIZE, remote_write=True)
    qp = device.queue_pair(DEPTHS, region, address_of(memory))
    end = End(device, memory, region, qp, address_of(memory), [])
    qp.prepare()
    try:
        yield end
    finally:
        qp.close()
        with contextlib.suppress(OSError):  # a test may have closed it
            end.region.close()
        device.close()


@contextlib.contextmanager
def pair(fabric: Any, *, receives: int = 4, path: PathSettings = IMPATIENT) -> Iterator[tuple[End, End]]:
    with end_at(fabric, fabric.one) as a, end_at(fabric, fabric.two) as b:
        a.qp.post_receives(receives)
        b.qp.post_receives(receives)
        for end, name, other, other_name in ((a, fabric.one, b, fabric.two), (b, fabric.two, a, fabric.one)):
            gid_index = rank_gids(read_gids(name))[0].index
            end.qp.connect(other.facts(other_name), psn=7, gid_index=gid_index, mtu=end.device.port().mtu, path=path)
        yield a, b


def test_it_lists_the_devices_and_says_what_their_ports_are(fabric: Any) -> None:
    binding = fabric.load()
    assert {fabric.one, fabric.two} <= set(binding.devices())
    device = binding.open(fabric.one)
    port = device.port()
    device.close()
    assert (port.active, port.mtu_bytes, port.ethernet) == (True, 4096, True)


def test_a_device_that_is_not_there_is_an_os_error(fabric: Any) -> None:
    with pytest.raises(OSError, match="nonesuch"):
        fabric.load().open("nonesuch")


def test_the_best_gid_is_roce_v2_over_ipv4(fabric: Any) -> None:
    best = rank_gids(read_gids(fabric.one))[0]
    assert (best.type, best.text) == ("RoCE v2", "10.77.0.1")


async def test_a_chain_of_writes_lands_in_order_with_its_immediates_and_one_completion(fabric: Any) -> None:
    with pair(fabric) as (a, b):
        a.memory[:] = os.urandom(SIZE)
        half = SIZE // 2
        chain = [
            a.write(b, 1, half, imm=0xDEADBEEF, signaled=False),
            Write(2, a.address + half, half, a.region.lkey, b.address + half, b.region.rkey, imm=1, signaled=True),
        ]
        a.qp.post_writes(chain)
        landed = await b.completed(2)
        assert [(done.status, done.of_receive, done.imm) for done in landed] == [
            (Status.SUCCESS, True, 0xDEADBEEF),
            (Status.SUCCESS, True, 1),
        ]
        assert b.memory == a.memory
        (sent,) = await a.completed(1)
        assert (sent.wr_id, sent.status, sent.of_receive) == (2, Status.SUCCESS, False)


def test_asking_for_completions_never_waits(fabric: Any) -> None:
    with pair(fabric) as (a, _):
        assert [a.qp.completions() for _ in range(3)] == [[], [], []]
        assert not os.get_blocking(a.qp.fd)


async def test_a_write_without_immediate_is_not_told_to_the_peer(fabric: Any) -> None:
    with pair(fabric) as (a, b):
        a.memory[:4] = b"quiet"[:4]
        a.qp.post_writes([a.write(b)])
        await a.completed(1)
        assert bytes(b.memory[:4]) == b"quie"
        assert b.qp.completions() == []


async def first_sent(end: End) -> Status:
    """How the first request of its own ended; receives are flushed around it."""
    count = 1
    while True:
        for done in await end.completed(count):
            if not done.of_receive:
                return done.status
        count = len(end.seen) + 1


@pytest.mark.parametrize("change", ["key", "beyond the region", "closed region"])
async def test_memory_that_may_not_be_written_is_a_remote_access_error(fabric: Any, change: str) -> None:
    with pair(fabric) as (a, b):
        wrong: dict[str, Any] = {}
        if change == "key":
            wrong = {"rkey": b.region.rkey ^ 0x5A5A00}
        elif change == "beyond the region":
            wrong = {"remote_address": b.address + 100}
        else:
            b.region.close()
        a.qp.post_writes([a.write(b, imm=1, **wrong)])
        assert await first_sent(a) is Status.REM_ACCESS_ERR


async def test_a_peer_without_a_receive_is_receiver_not_ready(fabric: Any) -> None:
    with pair(fabric, receives=0) as (a, b):
        a.qp.post_writes([a.write(b, imm=1)])
        assert await first_sent(a) is Status.RNR_RETRY_EXC_ERR


async def test_a_peer_that_is_gone_is_retries_exceeded_and_the_rest_is_flushed(fabric: Any) -> None:
    with pair(fabric) as (a, b):
        b.qp.close()
        a.qp.post_writes([a.write(b, number, imm=1) for number in range(3)])
        done = await a.completed(3)
        sent = [one.status for one in done if not one.of_receive]
        assert sent == [Status.RETRY_EXC_ERR, Status.WR_FLUSH_ERR, Status.WR_FLUSH_ERR]


def test_more_than_the_queue_holds_is_refused(fabric: Any) -> None:
    """What fitted was posted all the same; so the relay's windows stay below the depth."""
    with pair(fabric) as (a, b):
        chain = [a.write(b, signaled=False, size=8) for _ in range(2_000)]
        with pytest.raises(OSError, match=r"."):
            a.qp.post_writes(chain)


def test_closing_twice_is_closing_once(fabric: Any) -> None:
    with end_at(fabric, fabric.one) as end:
        end.qp.close()
        end.qp.close()
        assert end.qp.completions() == []


def test_nothing_is_left_open(fabric: Any) -> None:
    with pair(fabric):
        pass
    before = len(os.listdir("/proc/self/fd"))
    with pair(fabric):
        pass
    assert len(os.listdir("/proc/self/fd")) == before
