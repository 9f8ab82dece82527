"""The bounded buffer behind every subscription, shared by the adapters so that both shed in the same way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import structlog

from isthmus_shared.bus.port import BusMessage


class PendingMessages:
    """A `Subscription`: what was delivered and not yet taken, at most `max_pending` messages.

    One more is dropped and counted. Shedding is logged at the 1st, 2nd, 4th, 8th ... loss, so that a flood of
    messages does not become a flood of log lines.
    """

    def __init__(self, subject: str, *, max_pending: int) -> None:
        if max_pending < 1:
            raise ValueError(f"max_pending must be at least 1, not {max_pending}")
        self.subject = subject
        self._max_pending = max_pending
        self._messages: deque[BusMessage] = deque()
        self._wake = asyncio.Event()
        self._ended = False
        self._dropped = 0

    @property
    def dropped(self) -> int:
        return self._dropped

    def offer(self, message: BusMessage) -> None:
        """Never waits, never raises: it runs in the bus' reader."""
        if self._ended:
            return
        if len(self._messages) >= self._max_pending:
            self._dropped += 1
            if self._dropped & (self._dropped - 1) == 0:
                structlog.get_logger().warning(
                    "bus.messages_dropped",
                    subject=self.subject,
                    dropped=self._dropped,
                    max_pending=self._max_pending,
                )
            return
        self._messages.append(message)
        self._wake.set()

    def end(self) -> None:
        """Drop what is pending and end the iteration."""
        self._ended = True
        self._messages.clear()
        self._wake.set()

    async def unsubscribe(self) -> None:
        self.end()

    def __aiter__(self) -> AsyncIterator[BusMessage]:
        return self

    async def __anext__(self) -> BusMessage:
        while not self._messages:
            if self._ended:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._messages.popleft()

    def take_waiting(self) -> list[BusMessage]:
        waiting = list(self._messages)
        self._messages.clear()
        return waiting
