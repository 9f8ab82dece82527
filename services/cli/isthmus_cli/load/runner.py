"""Runs the load: many clients on one event loop, each with its own connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from random import Random

from isthmus_cli.load.connection import LoadConnection, Outcome, clock_s, connect
from isthmus_cli.load.plan import Arrival, Asking, Shape
from isthmus_cli.load.target import Target

RETRY_S = 0.05
"""After a connection that could not be had, in a closed loop."""
MAX_OPEN = 20_000
"""Requests under way at once in an open loop; more are counted as errors (`too_many`), for the server has long lost."""

Done = Callable[[Outcome], None]


class Load:
    """`on_done` is called with each outcome that began; times are `clock_s`'s."""

    def __init__(self, target: Target, asking: Asking, on_done: Done, *, timeout_s: float, seed: int) -> None:
        self._target, self._asking, self._on_done, self._timeout_s = target, asking, on_done, timeout_s
        self._random = Random(seed)
        self._idle: deque[LoadConnection] = deque()
        self.open = 0
        self.most_open = 0

    async def closed_loop(self, clients: int, seconds: float, shape: Shape) -> None:
        """Each client asks again as soon as it is answered; what is under way at the end is waited for."""
        stop_s = clock_s() + seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(self._client(stop_s, shape))
        self.close()

    async def open_loop(self, arrivals: Iterable[Arrival]) -> None:
        """Each request at its time, however many are under way."""
        began_s = clock_s()
        async with asyncio.TaskGroup() as tasks:
            for arrival in arrivals:
                due_s = began_s + arrival.at_s
                if (wait_s := due_s - clock_s()) > 0:
                    await asyncio.sleep(wait_s)
                if self.open >= MAX_OPEN:
                    self._on_done(Outcome(due_s, ended_s=due_s, error="too_many"))
                    continue
                tasks.create_task(self._one(arrival.shape, due_s))
        self.close()

    async def once(self, shape: Shape) -> Outcome:
        """One request outside the count."""
        connection, outcome = await self._ask(None, shape)
        if connection is not None:
            connection.close()
        return outcome

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _client(self, stop_s: float, shape: Shape) -> None:
        connection: LoadConnection | None = None
        while clock_s() < stop_s:
            connection, outcome = await self._ask(connection, shape)
            self._on_done(outcome)
            if outcome.error is not None and connection is None:
                await asyncio.sleep(RETRY_S)
        if connection is not None:
            connection.close()

    async def _one(self, shape: Shape, due_s: float) -> None:
        """A late start counts against the server only if it is: `asked_s` is when it was due."""
        connection, outcome = await self._ask(self._idle.pop() if self._idle else None, shape)
        outcome.asked_s = min(outcome.asked_s, due_s)
        if connection is not None:
            self._idle.append(connection)
        self._on_done(outcome)

    async def _ask(self, connection: LoadConnection | None, shape: Shape) -> tuple[LoadConnection | None, Outcome]:
        """Over a connection that may have been closed meanwhile, or a new one; None comes back for one that is gone."""
        began_s = clock_s()
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        request = self._target.request(self._asking.path, self._asking.body(shape, self._random))
        outcome = Outcome(began_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                if connection is None or connection.closed:
                    connection = await connect(self._target)
                outcome = await connection.ask(request, streams=self._asking.stream)
        except TimeoutError:
            outcome.error, connection = "timeout", None
        except OSError as error:
            outcome.error, connection = _kind(error), None
        finally:
            self.open -= 1
        outcome.asked_s = began_s
        outcome.ended_s = outcome.ended_s or clock_s()
        if connection is not None and connection.closed:
            connection = None
        return connection, outcome


def _kind(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection_refused"
    return "connection_failed"
