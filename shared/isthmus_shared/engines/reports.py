"""Reports from the step loop to its one consumer, and the recent speeds that heartbeats tell."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from isthmus_shared.engines.port import StepReport

MAX_REPORTS = 256
"""Steps that a worker may be behind before stepping pauses: several seconds of decode, far above one bus hiccup."""
RECENT_STEPS = 32
"""Steps over which speeds are averaged: about a second of decode, so that a heartbeat follows the load."""


class ReportQueue:
    """Bounded; a slow consumer stops the steps rather than losing a token."""

    def __init__(self) -> None:
        self._reports: deque[StepReport] = deque()
        self._changed = asyncio.Event()
        self._draining = False
        self._closed = False

    async def put(self, report: StepReport) -> None:
        """Waits while the queue is full, until `drain`."""
        while len(self._reports) >= MAX_REPORTS and not self._draining:
            self._changed.clear()
            await self._changed.wait()
        self._reports.append(report)
        self._changed.set()

    def drain(self) -> None:
        """The end is near, and the consumer may be gone: nothing waits for room any more."""
        self._draining = True
        self._changed.set()

    def close(self) -> None:
        """Whatever is queued is still delivered, then the iteration ends."""
        self._draining = self._closed = True
        self._changed.set()

    async def iterate(self) -> AsyncIterator[StepReport]:
        while True:
            while self._reports:
                report = self._reports.popleft()
                self._changed.set()
                yield report
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()


class SpeedMeter:
    def __init__(self) -> None:
        self._decodes: deque[float] = deque(maxlen=RECENT_STEPS)
        self._prefills: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)

    def note(self, report: StepReport) -> None:
        if report.decode_sequences:
            self._decodes.append(report.step_s)
        if report.prefill_tokens:
            self._prefills.append((report.prefill_tokens, report.step_s))

    @property
    def decode_step_s(self) -> float | None:
        return sum(self._decodes) / len(self._decodes) if self._decodes else None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        took_s = sum(step_s for _, step_s in self._prefills)
        return sum(tokens for tokens, _ in self._prefills) / took_s if took_s > 0 else None
