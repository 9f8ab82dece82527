"""Subscribing when the bus may be away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from isthmus_shared.bus.port import Bus, Subscription
from isthmus_shared.errors import BusDisconnected


@asynccontextmanager
async def subscribed(
    bus: Bus, subject: str, *, queue: str | None = None, max_pending: int = 4096
) -> AsyncIterator[Subscription]:
    """As `Bus.subscribe`, but entry waits for the bus. `BusDisconnected` only when this client is closed."""
    async with AsyncExitStack() as stack:
        subscription: Subscription | None = None
        while subscription is None:
            await bus.wait_connected()
            try:
                subscription = await stack.enter_async_context(
                    bus.subscribe(subject, queue=queue, max_pending=max_pending)
                )
            except BusDisconnected:
                continue
        yield subscription
