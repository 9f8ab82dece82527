from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from isthmus_shared.bus.memory import MemoryBroker
from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.bus.port import Bus
from isthmus_shared.bus.server import EmbeddedNats

MAX_PAYLOAD_BYTES = 1024 * 1024


class Net:
    """A broker of either kind: makes clients, and takes the broker away and back."""

    def __init__(
        self,
        client: Callable[[str], Awaitable[Bus]],
        outage: Callable[[], Awaitable[None]],
        recovery: Callable[[], Awaitable[None]],
    ) -> None:
        self.client, self.outage, self.recovery = client, outage, recovery


@pytest.fixture(params=["memory", "nats"])
async def net(request: pytest.FixtureRequest) -> AsyncIterator[Net]:
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            broker = MemoryBroker(max_payload_bytes=MAX_PAYLOAD_BYTES)

            async def memory_client(name: str) -> Bus:
                bus = broker.client(name)
                stack.push_async_callback(bus.close)
                return bus

            async def disconnect() -> None:
                broker.disconnect()

            async def reconnect() -> None:
                broker.reconnect()

            yield Net(memory_client, disconnect, reconnect)
        else:
            server = await stack.enter_async_context(EmbeddedNats(max_payload_bytes=MAX_PAYLOAD_BYTES))

            async def nats_client(name: str) -> Bus:
                return await stack.enter_async_context(await NatsBus.connect(server.url, name=name))

            async def crash() -> None:
                await server.stop(kill=True)

            yield Net(nats_client, crash, server.start)
