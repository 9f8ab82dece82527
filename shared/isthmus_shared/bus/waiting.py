"""Small things about tasks and futures that wait for the bus."""

from __future__ import annotations

import asyncio

from isthmus_shared.bus.port import BusMessage
from isthmus_shared.errors import IsthmusError

RETRY_S = 0.1
"""Between two cancellations of a task that swallowed one."""


def fail(future: asyncio.Future[BusMessage], error: IsthmusError) -> None:
    if not future.done():
        future.set_exception(error)


async def end(task: asyncio.Task[None]) -> None:
    """Cancel until it takes: nats-py waits by `wait_for`, which up to Python 3.11 may swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=RETRY_S)
    observe(task)


def observe(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
