"""A TCP proxy that can damage, stall and cut what passes through it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

Damage = Callable[[bytes], bytes]


class TcpProxy:
    """Bytes from `target` back to whoever connected go through `damage`; both directions wait while stalled."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self.damage: Damage = bytes
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""

    def stall(self) -> None:
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, back}
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pump(reader, back, bytes))
            group.create_task(self._pump(there, writer, lambda data: self.damage(data)))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Damage) -> None:
        try:
            while data := await reader.read(65_536):
                await self._flowing.wait()
                writer.write(change(data))
                await writer.drain()
            await self._flowing.wait()  # a stalled path does not carry an end either
        except OSError:
            pass  # one side is gone: the other follows
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def proxy_to(target: str) -> AsyncIterator[TcpProxy]:
    proxy = TcpProxy(target)
    running: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        await proxy._connected(reader, writer)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    proxy.address = f"{host}:{port}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.resume()
        proxy.cut()
        await asyncio.gather(*running, return_exceptions=True)
