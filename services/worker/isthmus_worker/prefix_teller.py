"""Tells planners what the engine has cached of prompts: changes a few times a second, everything when asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from isthmus_shared.bus.port import Bus
from isthmus_shared.engines.prefix_log import PrefixLog
from isthmus_shared.errors import BusDisconnected, Fault, PayloadTooLarge, StaleParty
from isthmus_shared.messages import subjects
from isthmus_shared.messages.prefix import (
    MAX_SNAPSHOT_HASHES,
    MAX_TOLD_HASHES,
    PrefixEvents,
    PrefixSnapshot,
    PrefixSnapshotRequest,
)
from isthmus_shared.messages.work import WorkerRef

TELL_S = 0.1
"""Changes wait so long for others: ten small messages a second at most, and a planner that hears of a prefix before
the second of two prompts that a person sends."""


class PrefixTeller:
    """An event that could not be sent is skipped: the next number, or the heartbeat's, tells planners of the gap."""

    def __init__(self, worker: WorkerRef, bus: Bus) -> None:
        self._worker, self._bus = worker, bus
        self._log: PrefixLog | None = None
        self._some = asyncio.Event()
        self._sending = asyncio.Lock()
        self.sequence = 0
        """Of the last event; what it cannot say in events is a number left out."""

    def follow(self, log: PrefixLog | None) -> None:
        """Of an engine that has just started; None when the one before has gone. What that had is there no more."""
        if self._log is not None:
            self.sequence += 1
        self._log = log

    def notice(self) -> None:
        """Call after each step."""
        if self._log is not None and self._log.pending:
            self._some.set()

    async def run(self) -> None:
        while True:
            await self._some.wait()
            await asyncio.sleep(TELL_S)
            self._some.clear()
            await self._send(self._news())

    async def snapshot(self, request: PrefixSnapshotRequest) -> PrefixSnapshot:
        if request.incarnation != self._worker.incarnation:
            raise StaleParty(f"worker {self._worker.worker_id} has restarted")
        news = self._news()  # first: what is shown is what has been told up to `sequence`
        hashes = () if self._log is None else self._log.snapshot(MAX_SNAPSHOT_HASHES)
        shown = PrefixSnapshot(sequence=self.sequence, hashes=b"".join(hashes))
        await self._send(news)
        return shown

    @staticmethod
    def refuse(fault: Fault) -> PrefixSnapshot:
        return PrefixSnapshot(fault=fault)

    def _news(self) -> list[PrefixEvents]:
        if self._log is None:
            return []
        changes = self._log.take()
        if not changes.complete:
            self.sequence += 1
            return []
        news = []
        size = MAX_TOLD_HASHES
        for at in range(0, max(len(changes.stored), len(changes.removed)), size):
            self.sequence += 1
            news.append(
                PrefixEvents(
                    worker=self._worker,
                    sequence=self.sequence,
                    stored=b"".join(changes.stored[at : at + size]),
                    removed=b"".join(changes.removed[at : at + size]),
                )
            )
        return news

    async def _send(self, news: Sequence[PrefixEvents]) -> None:
        async with self._sending:  # in order, whoever sends
            for event in news:
                with contextlib.suppress(BusDisconnected, PayloadTooLarge):  # a gap, which planners ask about
                    await self._bus.publish(subjects.PREFIX_EVENTS, event.encode())
