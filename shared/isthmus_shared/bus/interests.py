"""Who listens to what: the table of a bus in memory. Pure and without randomness, so that a simulation repeats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from isthmus_shared.bus.pending import PendingMessages
from isthmus_shared.bus.syntax import is_pattern, matches


class Member(Protocol):
    """A client as the table sees it."""

    @property
    def connected(self) -> bool: ...


@dataclass(eq=False, slots=True)
class Interest:
    owner: Member
    pending: PendingMessages
    queue: str | None


@dataclass(slots=True)
class InterestTable:
    """Who listens: exact subjects by name, patterns in order, and a turn counter for each queue group."""

    exact: dict[str, list[Interest]] = field(default_factory=dict)
    patterns: list[Interest] = field(default_factory=list)
    turns: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, interest: Interest) -> None:
        subject = interest.pending.subject
        if is_pattern(subject):
            self.patterns.append(interest)
        else:
            self.exact.setdefault(subject, []).append(interest)

    def remove(self, interest: Interest) -> None:
        subject = interest.pending.subject
        if is_pattern(subject):
            self.patterns.remove(interest)
            return
        listeners = self.exact[subject]
        listeners.remove(interest)
        if not listeners:
            del self.exact[subject]

    def receivers(self, subject: str) -> list[Interest]:
        """All plain listeners and one of each queue group that are connected now."""
        found = [*self.exact.get(subject, ()), *(i for i in self.patterns if matches(i.pending.subject, subject))]
        chosen: list[Interest] = []
        groups: dict[tuple[str, str], list[Interest]] = {}
        for interest in found:
            if not interest.owner.connected:
                continue
            if interest.queue is None:
                chosen.append(interest)
            else:
                groups.setdefault((interest.pending.subject, interest.queue), []).append(interest)
        for key, members in groups.items():
            turn = self.turns.get(key, 0)
            self.turns[key] = turn + 1
            chosen.append(members[turn % len(members)])
        return chosen

    @property
    def subjects(self) -> tuple[str, ...]:
        """Every registered subject or pattern, for tests that look for leaks."""
        exact = [i.pending.subject for listeners in self.exact.values() for i in listeners]
        return tuple(sorted([*exact, *(i.pending.subject for i in self.patterns)]))
