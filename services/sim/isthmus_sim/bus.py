"""The in-memory bus with weather: delays, shed and repeated step messages, submits that linger. All seeded."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from isthmus_shared.bus.memory import MemoryBus
from isthmus_shared.bus.pending import PendingMessages
from isthmus_shared.bus.port import BusMessage
from isthmus_shared.errors import BusDisconnected
from isthmus_shared.messages import subjects
from isthmus_sim.trace import Trace

_QUIET = (f"{subjects.ROOT}.heartbeat.", "$SRV.")
"""Not in the trace: they would bury the rest."""
CALM_DELAY_S = 0.002
"""A healthy bus; without any delay, too little could happen between two messages."""
LINGER_S = 0.5


@dataclass
class Weather:
    """How the bus treats messages now; faults change it and set it back."""

    rng: random.Random
    delay_s: float = CALM_DELAY_S
    """Longest; each message takes something between nothing and this."""
    shed_chance: float = 0.0
    """Of a step message: its subscriber was too slow."""
    repeat_chance: float = 0.0
    """Of a step message: it comes twice."""
    linger_chance: float = 0.0
    """Of a submit: it comes again, up to `LINGER_S` later, as from a buffer that is flushed after an outage."""

    def take_s(self) -> float:
        return self.rng.uniform(0, self.delay_s)

    def copies(self, subject: str) -> int:
        if not subject.startswith(f"{subjects.ROOT}.ingress."):
            return 1
        if self.shed_chance and self.rng.random() < self.shed_chance:
            return 0
        return 2 if self.repeat_chance and self.rng.random() < self.repeat_chance else 1

    def lingers(self, subject: str) -> bool:
        return bool(self.linger_chance) and subject.endswith(".submit") and self.rng.random() < self.linger_chance


class SimBus:
    """One process' client. `pump` must run beside whoever uses it."""

    def __init__(self, inner: MemoryBus, name: str, weather: Weather, trace: Trace) -> None:
        self.name = name
        self._inner, self._weather, self._trace = inner, weather, trace
        self._due: deque[tuple[float, str, bytes, str | None, Mapping[str, str] | None]] = deque()
        self._queued = asyncio.Event()

    @property
    def max_payload_bytes(self) -> int:
        return self._inner.max_payload_bytes

    @property
    def connected(self) -> bool:
        return self._inner.connected

    @property
    def outages(self) -> int:
        return self._inner.outages

    async def wait_connected(self) -> None:
        await self._inner.wait_connected()

    def new_inbox(self) -> str:
        return self._inner.new_inbox()

    def subscribe(
        self, subject: str, *, queue: str | None = None, max_pending: int = 4096
    ) -> AbstractAsyncContextManager[PendingMessages]:
        return self._inner.subscribe(subject, queue=queue, max_pending=max_pending)

    async def publish(
        self, subject: str, data: bytes, *, reply: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """What was published before it is delivered before it."""
        copies = self._weather.copies(subject)
        self._note("said", subject, copies=copies)
        for _ in range(copies):
            await self._later(self._weather.take_s(), subject, data, reply, headers)

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> BusMessage:
        """May overtake, and be overtaken by, whatever this process publishes on other subjects."""
        took_s = self._weather.take_s()
        self._note("asked", subject)
        if self._weather.lingers(subject):
            await self._later(self._weather.rng.uniform(0, LINGER_S), subject, data, None, headers)
        await asyncio.sleep(took_s)
        answer = await self._inner.request(subject, data, timeout_s=timeout_s - took_s, headers=headers)
        self._note("answered", subject)
        return answer

    async def pump(self) -> None:
        """Delivers what takes its time, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._due:
                self._queued.clear()
                await self._queued.wait()
            at_s, subject, data, reply, headers = self._due.popleft()
            if at_s > loop.time():
                await asyncio.sleep(at_s - loop.time())
            with contextlib.suppress(BusDisconnected):  # lost on its way
                await self._inner.publish(subject, data, reply=reply, headers=headers)

    async def close(self) -> None:
        self._due.clear()
        await self._inner.close()

    async def _later(
        self, in_s: float, subject: str, data: bytes, reply: str | None, headers: Mapping[str, str] | None
    ) -> None:
        if not self.connected:
            await self._inner.publish(subject, data, reply=reply, headers=headers)  # raises what it should
        self._due.append((asyncio.get_running_loop().time() + in_s, subject, data, reply, headers))
        self._queued.set()

    def _note(self, what: str, subject: str, **facts: object) -> None:
        if not subject.startswith(_QUIET):
            self._trace.note(self.name, what, subject=subject.removeprefix(f"{subjects.ROOT}."), **facts)
