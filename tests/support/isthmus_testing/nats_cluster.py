"""Three nats-servers that form one cluster with JetStream, on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

from isthmus_shared.bus.server import EmbeddedNats


@asynccontextmanager
async def nats_cluster(size: int = 3) -> AsyncIterator[list[EmbeddedNats]]:
    """JetStream wants every server to know the others from the start, so their cluster ports are chosen here: ones
    that were free a moment ago."""
    ports = _free_ports(size)
    routes = [f"nats-route://127.0.0.1:{port}" for port in ports]
    async with AsyncExitStack() as stack:
        servers = [
            EmbeddedNats(
                settings={
                    "server_name": f"n{number}",
                    "cluster": {"name": "isthmus-test", "listen": f"127.0.0.1:{port}", "routes": routes},
                }
            )
            for number, port in enumerate(ports)
        ]
        async with asyncio.TaskGroup() as starting:
            for server in servers:
                starting.create_task(stack.enter_async_context(server))
        yield servers


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
