"""What the lease's bucket promises, in a real JetStream and in the stand-in that simulations use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from isthmus_planner.leader.bucket import SUBJECT, JetStreamStore
from isthmus_planner.leader.lease import Record, Write
from isthmus_shared.bus.memory import MemoryBroker
from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.bus.port import Bus
from isthmus_shared.bus.server import EmbeddedNats
from isthmus_shared.errors import ProtocolViolation, Unavailable
from isthmus_sim.bucket import MemoryBucket

T = 10.0


@pytest.fixture(params=["memory", "nats"])
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            broker = MemoryBroker()
            bucket = MemoryBucket(broker.client("bucket"))
            serving = asyncio.create_task(bucket.run())
            await bucket.listening.wait()
            yield broker.client("planner")
            serving.cancel()
        else:
            server = await stack.enter_async_context(EmbeddedNats())
            yield await stack.enter_async_context(await NatsBus.connect(server.url, name="planner"))


async def test_a_new_bucket_holds_nothing_and_making_it_again_keeps_what_it_holds(bus: Bus) -> None:
    store = JetStreamStore(bus)
    await store.open(timeout_s=T)
    assert await store.read(timeout_s=T) == Record()
    revision = await store.write(Write(0, Record(holder="a", epoch=3, write=5)), timeout_s=T)
    assert revision is not None
    await JetStreamStore(bus).open(timeout_s=T)
    assert await store.read(timeout_s=T) == Record(revision, "a", 3, 5)


async def test_only_one_of_two_writes_over_the_same_record_is_done(bus: Bus) -> None:
    one, two = JetStreamStore(bus), JetStreamStore(bus)
    await one.open(timeout_s=T)
    first = await one.write(Write(0, Record(holder="a", epoch=1, write=1)), timeout_s=T)
    assert first is not None
    assert await two.write(Write(0, Record(holder="b", epoch=1, write=1)), timeout_s=T) is None
    second = await two.write(Write(first, Record(holder="b", epoch=2, write=2, released=True)), timeout_s=T)
    assert second is not None
    assert second > first
    assert await one.write(Write(first, Record(holder="a", epoch=2, write=3)), timeout_s=T) is None
    assert await one.read(timeout_s=T) == Record(second, "b", 2, 2, released=True)


async def test_without_a_bucket_it_says_what_to_do(bus: Bus) -> None:
    with pytest.raises(Unavailable) as failure:
        await JetStreamStore(bus).read(timeout_s=T)
    assert failure.value.todo or failure.value.why


async def test_a_record_of_another_making_is_an_error_and_not_a_leader(bus: Bus) -> None:
    store = JetStreamStore(bus)
    await store.open(timeout_s=T)
    await bus.request(SUBJECT, b"\xff{", timeout_s=T, headers={"Nats-Expected-Last-Subject-Sequence": "0"})
    with pytest.raises(ProtocolViolation, match="nats kv del"):
        await store.read(timeout_s=T)
