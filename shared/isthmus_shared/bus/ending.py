"""How tasks that nats-py runs in are ended, which swallows a cancellation now and then, and how a wait is failed."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_S = 0.1
"""Between two cancellations of one task."""


async def end(task: asyncio.Task[None]) -> None:
    """Cancel until it takes: nats-py waits by `wait_for`, which up to Python 3.11 may swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=AGAIN_S)
    observe(task)


def observe(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()


def fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
