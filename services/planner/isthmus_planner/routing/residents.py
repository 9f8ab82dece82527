"""Whose ITL targets a worker has to keep: those of the requests that were routed to it and have not ended. Pure.

A replica knows only what it routed itself, and learns of ends from the ingresses' outcomes; what nobody tells the end
of is forgotten when it must be over by any prediction.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

from isthmus_planner.routing.seat import NO_TARGETS, Targets
from isthmus_shared.ids import Incarnation, RequestId

MAX_RESIDENTS = 65_536
"""Requests with a target, on all workers together; the first to be over by prediction are forgotten first."""


@dataclass(frozen=True, slots=True)
class _Resident:
    life: Incarnation
    itl_target_s: float
    until_s: float


@dataclass(slots=True)
class _There:
    """On one worker."""

    requests: set[RequestId] = field(default_factory=set)
    targets: Counter[float] = field(default_factory=Counter)


class Residents:
    def __init__(self) -> None:
        self._by_request: dict[RequestId, _Resident] = {}
        self._until: list[tuple[float, RequestId]] = []
        """A heap; what is no longer in `_by_request` with that time is an old entry."""
        self._there: dict[Incarnation, _There] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def add(self, request: RequestId, life: Incarnation, itl_target_s: float, until_s: float) -> set[Incarnation]:
        """Returns the lives whose targets may have changed by it."""
        changed = self.remove(request) | {life}
        self._by_request[request] = _Resident(life, itl_target_s, until_s)
        heapq.heappush(self._until, (until_s, request))
        there = self._there.setdefault(life, _There())
        there.requests.add(request)
        there.targets[itl_target_s] += 1
        while len(self._by_request) > MAX_RESIDENTS:
            changed |= self._pop()
        if len(self._until) > 2 * MAX_RESIDENTS:
            self._until = [(resident.until_s, request) for request, resident in self._by_request.items()]
            heapq.heapify(self._until)
        return changed

    def remove(self, request: RequestId) -> set[Incarnation]:
        resident = self._by_request.pop(request, None)
        if resident is None:
            return set()
        there = self._there[resident.life]
        there.requests.discard(request)
        there.targets[resident.itl_target_s] -= 1
        if there.targets[resident.itl_target_s] <= 0:
            del there.targets[resident.itl_target_s]
        if not there.requests:
            del self._there[resident.life]
        return {resident.life}

    def expire(self, now_s: float) -> set[Incarnation]:
        changed: set[Incarnation] = set()
        while self._until and self._until[0][0] <= now_s:
            changed |= self._pop()
        return changed

    def clear(self, life: Incarnation) -> None:
        """It has ended, or nobody is left on it."""
        for request in tuple(self._there.get(life, _There()).requests):
            self.remove(request)

    def of(self, life: Incarnation) -> Targets:
        there = self._there.get(life)
        return NO_TARGETS if there is None else Targets(min(there.targets), len(there.requests))

    def check_invariants(self) -> None:
        assert len(self._by_request) <= MAX_RESIDENTS
        assert len(self._until) <= 2 * MAX_RESIDENTS + 1
        assert sum(len(there.requests) for there in self._there.values()) == len(self._by_request)
        for there in self._there.values():
            assert sum(there.targets.values()) == len(there.requests) > 0

    def _pop(self) -> set[Incarnation]:
        until_s, request = heapq.heappop(self._until)
        resident = self._by_request.get(request)
        return self.remove(request) if resident is not None and resident.until_s == until_s else set()
