"""The planner's ear for prefix caches: events in, snapshots asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from structlog.typing import FilteringBoundLogger

from isthmus_planner.prefix.following import Following
from isthmus_planner.prefix.index import PrefixIndex
from isthmus_planner.registry import ref_of
from isthmus_shared.bus.port import Bus
from isthmus_shared.errors import IsthmusError
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import WorkerHeartbeat
from isthmus_shared.messages.prefix import PrefixEvents, PrefixSnapshot, PrefixSnapshotRequest
from isthmus_shared.messages.work import WorkerRef

SNAPSHOTS_AT_ONCE = 4
"""A planner that has just started asks everyone: some megabytes in flight, not hundreds."""
SNAPSHOT_TIMEOUT_S = 2.0
"""A worker answers at once; one that does not is asked again at a later beat."""


class PrefixCaches:
    """Waiting asks are at most one for each worker alive."""

    def __init__(self, bus: Bus, log: FilteringBoundLogger, *, max_hashes: int) -> None:
        self._bus, self._log = bus, log
        self._following = Following(PrefixIndex(max_hashes=max_hashes))
        self._asks: asyncio.Queue[WorkerRef] = asyncio.Queue()

    @property
    def index(self) -> PrefixIndex:
        return self._following.index

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(SNAPSHOTS_AT_ONCE):
                tasks.create_task(self._ask_in_turn())

    def beat(self, beat: WorkerHeartbeat) -> None:
        if self._following.beat(beat):
            self._asks.put_nowait(ref_of(beat))

    async def events(self, message: PrefixEvents) -> None:
        if self._following.events(message):
            self._asks.put_nowait(message.worker)

    def keep(self, alive: Iterable[Incarnation]) -> None:
        self._following.keep(alive)

    async def _ask_in_turn(self) -> None:
        while True:
            worker = await self._asks.get()
            request = PrefixSnapshotRequest(incarnation=worker.incarnation)
            subject = subjects.worker_prefixes(worker.worker_id)
            try:
                answer = await self._bus.request(subject, request.encode(), timeout_s=SNAPSHOT_TIMEOUT_S)
                snapshot = PrefixSnapshot.decode(answer.data)
                if snapshot.fault is not None:
                    raise snapshot.fault.to_error()
            except IsthmusError as error:
                self._log.debug("prefix.no_snapshot", worker=worker.worker_id, code=error.code, why=error.text)
                self._following.gave_up(worker)
                continue
            self._log.debug("prefix.snapshot", worker=worker.worker_id, hashes=len(snapshot.hashes) // 8)
            if self._following.snapshot(worker, snapshot):
                self._asks.put_nowait(worker)
