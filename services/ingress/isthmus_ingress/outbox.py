"""Between a request's sagas and whoever writes its answer: in order, bounded, one waiter."""

from __future__ import annotations

import asyncio

from isthmus_ingress.saga_types import Deliver, End

MAX_UNREAD = 4096
"""Effects (as a rule one token each) that one answer may have unread. The writer takes all at once whenever its
client takes bytes, so this many are only waiting for a client that has stopped reading."""

Item = tuple[int, Deliver | End | list[int]]
"""(which choice, what). Of tokens that came as they usually do, the ids alone, as many as came in a row."""


class Outbox:
    __slots__ = ("_items", "_loop", "_run", "_run_of", "_waiter", "closed")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: list[Item] = []
        self._run: list[int] = []
        self._run_of = -1
        """The last item, if it is of ids, and whose."""
        self._waiter: asyncio.Future[None] | None = None
        self.closed = False

    def put(self, choice: int, effect: Deliver | End) -> bool:
        """False when the reader is too far behind (an End is always taken)."""
        if len(self._items) >= MAX_UNREAD and type(effect) is Deliver:
            return False
        self._items.append((choice, effect))
        self._run_of = -1
        self._wake()
        return True

    def flow(self, choice: int, token_ids: tuple[int, ...]) -> bool:
        """`put`, for ids alone."""
        if choice == self._run_of:  # whoever waits was woken by the first of them
            self._run.extend(token_ids)
            return len(self._run) <= MAX_UNREAD
        if len(self._items) >= MAX_UNREAD:
            return False
        self._run, self._run_of = list(token_ids), choice
        self._items.append((choice, self._run))
        self._wake()
        return True

    def close(self) -> None:
        """The client has gone: the waiting writer goes on, and finds `closed`."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> list[Item]:
        """All there is, waiting for the first; empty only when closed."""
        while not self._items and not self.closed:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items, self._run_of = self._items, [], -1
        return items
