"""Releases on their way: what is retained for requests that are over may go. Many travel in one message, since each is
worth less than a message, and a lost one costs nothing: the relay's budget and its deadline do the same, later."""

from __future__ import annotations

import asyncio

from isthmus_shared.bus.port import Bus
from isthmus_shared.errors import IsthmusError
from isthmus_shared.ids import Generation, RequestId
from isthmus_shared.messages import subjects
from isthmus_shared.messages.work import MAX_RELEASED, Release, Released, WorkerRef

GATHER_S = 0.1
"""From the first release for a worker to the message: retention is not short of memory for that long."""


class Releases:
    """One per ingress. `add` says whether the caller is to see to `send`, which gathers for a moment first."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: dict[WorkerRef, list[Released]] = {}

    def add(self, worker: WorkerRef, request_id: RequestId, generation: Generation) -> bool:
        released = self._waiting.setdefault(worker, [])
        released.append(Released(request_id=request_id, generation=generation))
        return len(released) == 1

    async def send(self, worker: WorkerRef) -> None:
        await asyncio.sleep(GATHER_S)
        released = self._waiting.pop(worker, [])
        for start in range(0, len(released), MAX_RELEASED):
            part = tuple(released[start : start + MAX_RELEASED])
            message = Release(incarnation=worker.incarnation, released=part)
            try:
                await self._bus.publish(subjects.worker_release(worker.worker_id), message.encode())
            except IsthmusError:
                return  # the bus is away: budgets and deadlines see to it
