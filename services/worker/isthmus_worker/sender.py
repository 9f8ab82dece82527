"""Sends step events in order, over outages of the bus: what could not be sent waits here, within a bound, so that a
bus that is back after a moment leaves no gap in any stream."""

from __future__ import annotations

import asyncio
from collections import deque

from structlog.typing import FilteringBoundLogger

from isthmus_shared.bus.port import Bus
from isthmus_shared.errors import BusDisconnected, PayloadTooLarge

MAX_WAITING_BYTES = 32 * 1024 * 1024
"""Some minutes of tokens of a full batch. By then the ingresses have given the streams up; the oldest goes first, and
the gap tells them."""


class EventSender:
    """`put` never waits; `run` sends until cancelled; `flushed` waits until nothing is left to send."""

    def __init__(self, bus: Bus, log: FilteringBoundLogger, *, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._bus, self._log = bus, log
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        self._some = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()

    def put(self, subject: str, data: bytes) -> None:
        self._waiting.append((subject, data))
        self._waiting_bytes += len(data)
        while self._waiting_bytes > self._max_waiting_bytes:
            self._waiting_bytes -= len(self._waiting.popleft()[1])
            self._dropped += 1
        self._some.set()
        self._none.clear()

    async def run(self) -> None:
        while True:
            await self._some.wait()
            while self._waiting:
                subject, data = self._waiting[0]
                try:
                    await self._bus.publish(subject, data)
                except BusDisconnected:
                    await self._await_bus()
                    continue  # the same again, unless it was dropped meanwhile
                except PayloadTooLarge as error:  # the bus came back with a lower limit
                    self._log.error("events.too_large", subject=subject, bytes=len(data), error=error.text)
                self._done(data)
            self._some.clear()
            self._none.set()

    async def flushed(self) -> None:
        await self._none.wait()

    async def _await_bus(self) -> None:
        self._log.warning("events.waiting", messages=len(self._waiting), bytes=self._waiting_bytes)
        await self._bus.wait_connected()
        self._log.info("events.resumed", messages=len(self._waiting), dropped=self._dropped)
        self._dropped = 0

    def _done(self, data: bytes) -> None:
        """`data` is out, and was the first that waited unless it was dropped during the publish."""
        if self._waiting and self._waiting[0][1] is data:
            self._waiting.popleft()
            self._waiting_bytes -= len(data)
