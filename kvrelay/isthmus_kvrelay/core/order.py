"""Which flow goes next: fair between sources by bytes served; within a source the earliest deadline first, aged.

A flow is due at its deadline, but never later than `AGE_LIMIT_S` after it was opened. So from that moment on no flow
that is opened later goes before it, however near that one's deadline: what it may still wait for is what was opened
before it was due, and one chunk of each other source per chunk of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import dataclass

from isthmus_kvrelay.core.names import FlowKey

AGE_LIMIT_S = 5.0
"""A tenth of the default transfer deadline: late enough that deadlines decide in a burst, early enough to finish."""


@dataclass(frozen=True, slots=True)
class Candidate:
    source: int
    due_s: float
    key: FlowKey


class FairOrder:
    """Those that have something to send now. Start-time fairness: who comes back from idleness has saved nothing up."""

    def __init__(self) -> None:
        self._live: dict[FlowKey, Candidate] = {}
        self._heaps: dict[int, list[tuple[float, FlowKey]]] = {}
        self._counts: dict[int, int] = {}
        self._served: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: FlowKey) -> bool:
        return key in self._live

    def offer(self, source: int, *, deadline_s: float, opened_s: float, key: FlowKey) -> None:
        """It has something to send. Nothing if that is known."""
        if key in self._live:
            return
        due_s = min(deadline_s, opened_s + AGE_LIMIT_S)
        if not self._counts.get(source):
            self._join(source)
        self._live[key] = Candidate(source, due_s, key)
        self._counts[source] = self._counts.get(source, 0) + 1
        heapq.heappush(self._heaps.setdefault(source, []), (due_s, key))

    def withdraw(self, key: FlowKey) -> None:
        candidate = self._live.pop(key, None)
        if candidate is None:
            return
        self._counts[candidate.source] -= 1
        if not self._counts[candidate.source]:
            del self._counts[candidate.source]
            del self._heaps[candidate.source]

    def peek(self, *, without: Container[int] = ()) -> Candidate | None:
        """The next one, of sources other than `without`."""
        heads = [(self._served[source], self._head(source)) for source in self._counts if source not in without]
        if not heads:
            return None
        return min(heads, key=lambda head: (head[0], head[1].due_s, head[1].key))[1]

    def served(self, source: int, size_bytes: int) -> None:
        self._served[source] += size_bytes

    def _head(self, source: int) -> Candidate:
        heap = self._heaps[source]
        while True:
            due_s, key = heap[0]
            candidate = self._live.get(key)
            if candidate is not None and (candidate.source, candidate.due_s) == (source, due_s):
                return candidate
            heapq.heappop(heap)

    def _join(self, source: int) -> None:
        level = min((self._served[other] for other in self._counts), default=None)
        if level is None:
            self._served = {}
            self._served[source] = 0
            return
        # Who was served beyond the others keeps that; who was not, and is idle, is forgotten.
        self._served = {s: served for s, served in self._served.items() if s in self._counts or served > level}
        self._served[source] = max(self._served.get(source, level), level)
