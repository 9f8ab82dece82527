"""What connects the processes of one node: a stream of bytes, and bells. Either end may be paused or vanish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from itertools import count

from isthmus_kvrelay.client.bell import Bell
from isthmus_sim.loop import Life, WorldLoop, world_loop


class PipeEnd(asyncio.Transport):
    """One end: its protocol's calls come within its process. Bytes keep their order; nothing is lost before an end."""

    peer: PipeEnd

    def __init__(self, protocol: asyncio.Protocol, life: Life) -> None:
        super().__init__()
        self._protocol, self._life = protocol, life
        self._loop: WorldLoop = world_loop()
        self._closing = self._lost = False
        self._unread_bytes = 0

    def run(self, call: Callable[..., object], *args: object) -> None:
        self._loop.call_soon(call, *args, context=self._life.context)

    # -- asyncio's names

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing:
            self.peer._unread_bytes += len(data)
            self.peer.run(self.peer._feed, bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.peer._unread_bytes

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self.run(self._end)
            self.peer.run(self.peer._end)

    def abort(self) -> None:
        self.close()

    def made(self) -> None:
        self._protocol.connection_made(self)

    def _feed(self, data: bytes) -> None:
        self._unread_bytes -= len(data)
        if not self._lost and not self._closing:
            self._protocol.data_received(data)

    def _end(self) -> None:
        self._closing = True
        if not self._lost:
            self._lost = True
            self._protocol.connection_lost(None)


def connect(client: asyncio.Protocol, life: Life, server: asyncio.Protocol, server_life: Life) -> PipeEnd:
    """Returns the client's end, whose protocol knows of it already. The server learns of it when it runs."""
    here, there = PipeEnd(client, life), PipeEnd(server, server_life)
    here.peer, there.peer = there, here
    here.made()
    there.run(there.made)
    return here


class Belfry:
    """Every bell of a world by its name."""

    def __init__(self) -> None:
        self.bells: dict[bytes, tuple[Context, Callable[[bytes], None]]] = {}
        self.numbers = count(1)

    def of(self, life: Life) -> Callable[[Callable[[bytes], None]], Bell]:
        return lambda rung: SimBell(self, life, rung)


class SimBell(Bell):
    """A bell without a socket."""

    def __init__(self, belfry: Belfry, life: Life, rung: Callable[[bytes], None]) -> None:
        self.name = b"bell-%d" % next(belfry.numbers)
        self._belfry = belfry
        self._world = world_loop()
        belfry.bells[self.name] = life.context, rung

    def ring(self, name: bytes, token: bytes) -> None:
        there = self._belfry.bells.get(name)
        if there is not None:
            context, rung = there
            self._world.call_soon(rung, token, context=context)

    def close(self) -> None:
        self._belfry.bells.pop(self.name, None)
