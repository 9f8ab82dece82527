"""Chunks of one lane on their way out: which wait, which are posted, and which flows the peer has fenced. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

from isthmus_kvrelay.core.events import FlowKey, SendChunk

MAX_FENCED = 8_192
"""Flows remembered as fenced. The core has forgotten a flow two turns of the loop after its fence; this many cannot
come in two turns."""


class Outbox:
    def __init__(self, *, dropped: Callable[[SendChunk], None], fenced: Callable[[FlowKey], None]) -> None:
        """`dropped`: it will not be written. `fenced`: nothing of that flow is under way, and nothing will be."""
        self._dropped, self._on_fenced = dropped, fenced
        self._waiting: deque[SendChunk] = deque()
        self._posted: Counter[FlowKey] = Counter()
        self._fenced: OrderedDict[FlowKey, None] = OrderedDict()
        self._unanswered: set[FlowKey] = set()

    def put(self, job: SendChunk) -> None:
        if job.key in self._fenced:
            self._dropped(job)
        else:
            self._waiting.append(job)

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, most: int) -> list[SendChunk]:
        """The next chunks, which the caller posts now."""
        jobs = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        self._posted.update(job.key for job in jobs)
        return jobs

    def finished(self, jobs: Iterable[SendChunk]) -> None:
        """Posted ones have landed."""
        for job in jobs:
            self._over(job.key)

    def again(self, jobs: list[SendChunk]) -> None:
        """Posted ones have not landed and never will: the rail is gone at both ends. They go first on another."""
        for job in reversed(jobs):
            if job.key in self._fenced:
                self._dropped(job)
            else:
                self._waiting.appendleft(job)
            self._over(job.key)

    def fence(self, key: FlowKey) -> None:
        self._fenced[key] = None
        self._fenced.move_to_end(key)
        if len(self._fenced) > MAX_FENCED:
            self._fenced.popitem(last=False)
        kept = deque(job for job in self._waiting if job.key != key)
        for job in self._waiting:
            if job.key == key:
                self._dropped(job)
        self._waiting = kept
        self._unanswered.add(key)
        self._answer(key)

    def empty(self) -> list[SendChunk]:
        """The lane is over: all that wait."""
        jobs = list(self._waiting)
        self._waiting.clear()
        self._unanswered.clear()
        return jobs

    def _over(self, key: FlowKey) -> None:
        self._posted[key] -= 1
        assert self._posted[key] >= 0
        if not self._posted[key]:
            del self._posted[key]
        self._answer(key)

    def _answer(self, key: FlowKey) -> None:
        if key in self._unanswered and key not in self._posted:
            self._unanswered.discard(key)
            self._on_fenced(key)
