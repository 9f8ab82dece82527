from __future__ import annotations

import asyncio
from collections.abc import Callable

_POLL_S = 0.005


async def eventually(predicate: Callable[[], bool], timeout_s: float = 10.0, *, what: str = "") -> None:
    """Return as soon as `predicate()` holds; `AssertionError` if it does not within `timeout_s`.

    For state that announces no event. Where there is an event, await it under `asyncio.timeout` instead.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not predicate():
        assert loop.time() < deadline, f"not within {timeout_s:g} s: {what or predicate}"
        await tick()


async def tick() -> None:
    """Let everything else run for a moment."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    loop.call_later(_POLL_S, over.set_result, None)
    await over
