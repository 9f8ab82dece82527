"""The part of JetStream that a lease uses, on any bus: one key-value bucket with compare-and-set."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass, field
from typing import Any

from isthmus_planner.leader.bucket import (
    CREATE,
    EXPECTED,
    GET,
    NO_MESSAGE,
    NO_STREAM,
    STREAM,
    SUBJECT,
    WRONG_LAST_SEQUENCE,
)
from isthmus_shared.bus.port import Bus, BusMessage


@dataclass
class Stored:
    """What the server keeps. `wipe` plays a server that lost it."""

    made: bool = False
    revision: int = 0
    data: bytes = b""
    writes: list[bytes] = field(default_factory=list)
    """Every record that was written, oldest first."""

    def wipe(self) -> None:
        self.made, self.revision, self.data = False, 0, b""

    def answer(self, message: BusMessage) -> dict[str, Any]:
        if message.subject == CREATE:
            self.made = True
            return {"config": {"name": STREAM}}
        if not self.made:
            return {"error": {"code": 404, "err_code": NO_STREAM, "description": "stream not found"}}
        if message.subject == GET:
            if not self.revision:
                return {"error": {"code": 404, "err_code": NO_MESSAGE, "description": "no message found"}}
            data = base64.b64encode(self.data).decode()
            return {"message": {"subject": SUBJECT, "seq": self.revision, "data": data}}
        if int(message.headers.get(EXPECTED, "-1")) != self.revision:
            return {"error": {"code": 400, "err_code": WRONG_LAST_SEQUENCE, "description": "wrong last sequence"}}
        self.revision, self.data = self.revision + 1, message.data
        self.writes.append(message.data)
        return {"stream": STREAM, "seq": self.revision}


class MemoryBucket:
    """Answers on `bus` until cancelled."""

    def __init__(self, bus: Bus, stored: Stored | None = None) -> None:
        self._bus = bus
        self.stored = stored or Stored()
        self.listening = asyncio.Event()

    async def run(self) -> None:
        async with (
            self._bus.subscribe(CREATE) as creates,
            self._bus.subscribe(GET) as reads,
            self._bus.subscribe(SUBJECT) as writes,
            asyncio.TaskGroup() as tasks,
        ):
            for subscription in (creates, reads, writes):
                tasks.create_task(self._serve(subscription))
            self.listening.set()

    async def _serve(self, messages: Any) -> None:
        async for message in messages:
            if message.reply is not None:
                await self._bus.publish(message.reply, json.dumps(self.stored.answer(message)).encode())
