"""What the buses without a server share: whether theirs is within reach, and who waits for something of it."""

from __future__ import annotations

import asyncio

from isthmus_shared.bus.port import BusMessage
from isthmus_shared.bus.refusals import disconnected


class Reach:
    """A base of `Bus`."""

    def __init__(self) -> None:
        self._up = asyncio.Event()
        self._up.set()
        self._closed = False
        self._outages = 0
        self._waiting: dict[asyncio.Future[BusMessage], None] = {}  # no set: its order would differ from run to run

    @property
    def connected(self) -> bool:
        return self._up.is_set() and not self._closed

    @property
    def outages(self) -> int:
        return self._outages

    async def wait_connected(self) -> None:
        while not self.connected:  # it may be away again by the time that a waiter runs
            if self._closed:
                raise disconnected(closed=True)
            await self._up.wait()

    def reconnect(self) -> None:
        if not self._closed:
            self._up.set()

    def _lose(self) -> None:
        """Waiting requests fail at once."""
        self._outages += self._up.is_set()
        self._up.clear()
        self._fail_waiting()

    def _shut(self) -> None:
        """For good."""
        self._closed = True
        self._fail_waiting()
        self._up.set()  # whoever waits for a connection is told that there will be none

    def _check_connected(self) -> None:
        if not self.connected:
            raise disconnected(closed=self._closed)

    def _fail_waiting(self) -> None:
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(disconnected(closed=self._closed))
