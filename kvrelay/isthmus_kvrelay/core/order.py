"""Which flow of a lane goes next: fair between sources by bytes served, earliest deadline first within a source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from isthmus_kvrelay.core.events import FlowKey


@dataclass(frozen=True, slots=True)
class Candidate:
    source: int
    """The producer's id."""
    deadline_s: float
    key: FlowKey


class FairOrder:
    """Start-time fairness: a source that comes back from idleness starts level with the least served one."""

    def __init__(self) -> None:
        self._served: dict[int, int] = {}

    def pick(self, candidates: Iterable[Candidate]) -> Candidate | None:
        waiting = list(candidates)
        sources = {c.source for c in waiting}
        level = min((served for source, served in self._served.items() if source in sources), default=0)
        self._served = {source: self._served.get(source, level) for source in sources}
        return min(waiting, key=lambda c: (self._served[c.source], c.deadline_s, c.key), default=None)

    def served(self, source: int, size_bytes: int) -> None:
        self._served[source] += size_bytes
