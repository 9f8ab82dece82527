from __future__ import annotations

import asyncio

import structlog

from isthmus_shared.bus.memory import MemoryBroker
from isthmus_testing import eventually
from isthmus_worker.sender import EventSender


async def test_beyond_the_bound_the_oldest_are_dropped_and_the_order_is_kept(memory_broker: MemoryBroker) -> None:
    got: list[bytes] = []
    reader = memory_broker.client("reader")
    bus = memory_broker.client("worker")
    sender = EventSender(bus, structlog.get_logger(), max_waiting_bytes=30)

    async def collect() -> None:
        async with reader.subscribe("events") as subscription:
            async for message in subscription:
                got.append(message.data)

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(collect()), tasks.create_task(sender.run())]
        await eventually(lambda: "events" in memory_broker.subscriptions)
        sender.put("events", b"0" * 10)
        await sender.flushed()
        bus.disconnect()
        for number in range(1, 6):
            sender.put("events", str(number).encode() * 10)
        bus.reconnect()
        await sender.flushed()
        await eventually(lambda: len(got) == 4)
        for task in running:
            task.cancel()
    assert [data[:1] for data in got] == [b"0", b"3", b"4", b"5"]
