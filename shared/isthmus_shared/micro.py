"""The NATS micro protocol, so that the standard tools (`nats service ls/info/stats`) see every process.

https://github.com/nats-io/nats-architecture-and-design/blob/main/adr/ADR-32.md: each process answers
``$SRV.PING``, ``$SRV.INFO`` and ``$SRV.STATS``, and the same with ``.<name>`` and ``.<name>.<id>``, in JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from isthmus_shared.bus.port import Bus
from isthmus_shared.bus.subscribing import subscribed
from isthmus_shared.errors import IsthmusError

PREFIX = "$SRV"
DEFAULT_QUEUE = "q"
MAX_PENDING = 256
"""Monitoring asks now and then; a burst beyond this may go unanswered."""


@dataclass(slots=True)
class Endpoint:
    """One subject that is served, and what has happened on it."""

    name: str
    subject: str
    queue: str | None
    requests: int = 0
    errors: int = 0
    processing_s: float = 0.0
    last_error: str = ""
    serving: int = 0
    """How many loops serve it now; 0 after a change of role, and then it is not shown."""

    def record(self, took_s: float, error: IsthmusError | None) -> None:
        self.requests += 1
        self.processing_s += took_s
        if error is not None:
            self.errors += 1
            self.last_error = f"{error.code}: {error.what}"

    def info(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "subject": self.subject,
            "queue_group": self.queue or DEFAULT_QUEUE,
            "metadata": {},
        }

    def stats(self) -> dict[str, Any]:
        total_ns = round(self.processing_s * 1e9)
        return {
            "name": self.name,
            "subject": self.subject,
            "queue_group": self.queue or DEFAULT_QUEUE,
            "num_requests": self.requests,
            "num_errors": self.errors,
            "last_error": self.last_error,
            "processing_time": total_ns,
            "average_processing_time": total_ns // self.requests if self.requests else 0,
            "data": None,
        }


@dataclass(slots=True)
class MicroService:
    """Identity and endpoints of one process. `name` may hold letters, digits, ``-`` and ``_`` only."""

    name: str
    id: str
    version: str
    started: datetime
    description: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    endpoints: list[Endpoint] = field(default_factory=list)

    @contextmanager
    def serving(self, name: str, subject: str, queue: str | None) -> Iterator[Endpoint]:
        """The endpoint, shown while the context lasts; its counts go on when it is served again."""
        found = [e for e in self.endpoints if (e.name, e.subject, e.queue) == (name, subject, queue)]
        endpoint = found[0] if found else Endpoint(name, subject, queue)
        if not found:
            self.endpoints.append(endpoint)
        endpoint.serving += 1
        try:
            yield endpoint
        finally:
            endpoint.serving -= 1

    def answer(self, verb: str) -> bytes | None:
        """The JSON for PING, INFO or STATS; None for another verb."""
        base = {"name": self.name, "id": self.id, "version": self.version, "metadata": self.metadata}
        shown = [endpoint for endpoint in self.endpoints if endpoint.serving]
        match verb:
            case "PING":
                extra: dict[str, Any] = {}
            case "INFO":
                extra = {"description": self.description, "endpoints": [e.info() for e in shown]}
            case "STATS":
                started = self.started.isoformat().replace("+00:00", "Z")
                extra = {"started": started, "endpoints": [e.stats() for e in shown]}
            case _:
                return None
        return json.dumps({"type": f"io.nats.micro.v1.{verb.lower()}_response", **base, **extra}).encode()

    async def run(self, bus: Bus) -> None:
        """Answer until cancelled, over any outage."""
        async with asyncio.TaskGroup() as tasks:
            for verb in ("PING", "INFO", "STATS"):
                for suffix in ("", f".{self.name}", f".{self.name}.{self.id}"):
                    tasks.create_task(self._listen(bus, f"{PREFIX}.{verb}{suffix}", verb))

    async def _listen(self, bus: Bus, subject: str, verb: str) -> None:
        async with subscribed(bus, subject, max_pending=MAX_PENDING) as subscription:
            async for message in subscription:
                answer = self.answer(verb)
                if message.reply is not None and answer is not None:
                    with contextlib.suppress(IsthmusError):  # whoever asked will ask again
                        await bus.publish(message.reply, answer)
