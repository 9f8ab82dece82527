"""What a worker tells of its prefix cache adds up, whatever is lost and whoever asks in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from isthmus_shared.bus.memory import MemoryBroker, MemoryBus
from isthmus_shared.bus.port import Subscription
from isthmus_shared.engines.prefix_log import PrefixLog
from isthmus_shared.errors import StaleParty
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages import subjects
from isthmus_shared.messages.prefix import MAX_TOLD_HASHES, PrefixEvents, PrefixSnapshotRequest
from isthmus_testing.worker_parts import WORKER
from isthmus_worker.prefix_teller import PrefixTeller

ASK = PrefixSnapshotRequest(incarnation=WORKER.incarnation)


def hashes(count: int, *, first: int = 0) -> list[bytes]:
    return [(first + i).to_bytes(8, "big") for i in range(count)]


@asynccontextmanager
async def telling(log: PrefixLog | None) -> AsyncIterator[tuple[PrefixTeller, MemoryBus, Subscription]]:
    broker = MemoryBroker()
    bus, planner = broker.client("worker"), broker.client("planner")
    teller = PrefixTeller(WORKER, bus)
    teller.follow(log)
    async with asyncio.timeout(20), planner.subscribe(subjects.PREFIX_EVENTS) as heard:
        running = asyncio.create_task(teller.run())
        yield teller, bus, heard
        running.cancel()


async def heard_next(heard: Subscription) -> PrefixEvents:
    async for message in heard:
        return PrefixEvents.decode(message.data)
    raise AssertionError("the subscription ended")


async def test_changes_are_told_together_and_numbered() -> None:
    log = PrefixLog()
    async with telling(log) as (teller, _, heard):
        log.stored(hashes(2))
        teller.notice()
        log.stored(hashes(1, first=7))
        teller.notice()
        first = await heard_next(heard)
        log.removed(hashes(1))
        teller.notice()
        second = await heard_next(heard)
    assert (first.sequence, first.stored, first.removed) == (1, b"".join([*hashes(2), *hashes(1, first=7)]), b"")
    assert (second.sequence, second.stored, second.removed) == (2, b"", hashes(1)[0])
    assert teller.sequence == 2


async def test_many_changes_are_several_events() -> None:
    log = PrefixLog()
    async with telling(log) as (teller, _, heard):
        log.stored(hashes(MAX_TOLD_HASHES + 3))
        teller.notice()
        events = [await heard_next(heard) for _ in range(2)]
    assert [event.sequence for event in events] == [1, 2]
    assert b"".join(event.stored for event in events) == b"".join(hashes(MAX_TOLD_HASHES + 3))


async def test_a_snapshot_is_what_was_told_up_to_its_number() -> None:
    log = PrefixLog()
    async with telling(log) as (teller, _, heard):
        log.stored(hashes(3))
        shown = await teller.snapshot(ASK)
        told = await heard_next(heard)
        assert shown.sequence == told.sequence == 1
        assert shown.hashes == told.stored == b"".join(hashes(3))
        with pytest.raises(StaleParty):
            await teller.snapshot(PrefixSnapshotRequest(incarnation=Incarnation("another")))


async def test_what_was_lost_or_given_up_leaves_a_gap() -> None:
    log = PrefixLog(max_changes=4)
    async with telling(log) as (teller, bus, heard):
        bus.disconnect()
        log.stored(hashes(1))
        assert (await teller.snapshot(ASK)).sequence == 1  # its event found no bus
        bus.reconnect()
        log.stored(hashes(9, first=10))
        assert (await teller.snapshot(ASK)).sequence == 2  # too many to be told
        log.stored(hashes(1, first=30))
        teller.notice()
        assert (await heard_next(heard)).sequence == 3


async def test_another_engine_begins_with_a_gap() -> None:
    log = PrefixLog()
    async with telling(log) as (teller, _, _heard):
        log.stored(hashes(2))
        await teller.snapshot(ASK)
        teller.follow(None)
        teller.notice()
        assert (await teller.snapshot(ASK)).hashes == b""
        assert teller.sequence == 2
        teller.follow(PrefixLog())
        assert (await teller.snapshot(ASK)).hashes == b""
