"""The order of those who wait for the same model. Pure.

* Higher priority first.
* Within a priority, start-time fair queueing between tenants: each entry gets a start tag, the larger of the line's
  virtual time and the tenant's last finish tag; its finish tag is `cost / weight` later; least start tag first, and the
  line's virtual time is that of whoever went last. Two tenants that both always wait differ, in cost over weight, by
  at most one entry of each (Goyal, Vin and Cheng, "Start-time fair queuing", 1996).
* Nobody starves: of every `AGED_EVERY` that go, one is the oldest that has waited for `AGED_S`, whatever its priority.
* One that does not fit is passed by those behind it at most `MAX_PASSED` times; then they wait for it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

AGED_S = 10.0
"""Longer than any interactive target, so that it changes nothing where priorities are met."""
AGED_EVERY = 4
"""A quarter of what goes is enough to bound every wait, and leaves three quarters to the priorities."""
MAX_PASSED = 16
"""By then whoever could go in its place has had a turn; room that becomes free is kept for it."""
LOOKAHEAD = 8
"""Entries tried when something becomes free: each costs a choice among all workers."""


@dataclass(slots=True)
class Entry:
    key: str
    """The request's id."""
    tenant: str
    priority: int
    cost: float
    """Of its work, in tokens."""
    since_s: float
    """When it began to wait, at whichever planner."""
    until_s: float
    """When waiting has become pointless."""
    passed: int = 0
    start: float = 0.0


@dataclass(slots=True)
class _Virtual:
    """Of one priority."""

    now: float = 0.0
    count: int = 0
    """Entries of that priority."""
    finish: dict[str, float] = field(default_factory=dict)
    """By tenant; only those above `now` matter."""


_Rank = tuple[int, float, float, str]


class Line:
    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: of tenants; 1 for those that are not named."""
        self._weights = dict(weights or {})
        self._entries: dict[str, Entry] = {}
        self._order: list[_Rank] = []
        self._virtual: dict[int, _Virtual] = {}
        self._since_aged = 0
        """So many have gone since an aged one had its turn."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def add(self, entry: Entry, *, moved: bool = False) -> None:
        """`moved`: it has waited elsewhere, and comes before its tenant's others."""
        assert entry.key not in self._entries, f"{entry.key} waits already"
        virtual = self._virtual.setdefault(entry.priority, _Virtual())
        finish = virtual.finish.get(entry.tenant, 0.0)
        entry.start = virtual.now if moved else max(virtual.now, finish)
        span = entry.cost / self._weights.get(entry.tenant, 1.0)
        virtual.finish[entry.tenant] = max(entry.start, finish) + span
        virtual.count += 1
        self._entries[entry.key] = entry
        insort(self._order, _rank(entry))

    def remove(self, key: str) -> Entry | None:
        """It has gone elsewhere, or given up."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            del self._order[self.position_of(entry)]
            virtual = self._virtual[entry.priority]
            virtual.count -= 1
            if not virtual.count:
                del self._virtual[entry.priority]  # an idle line keeps no account of the past
        return entry

    def went(self, key: str, now_s: float) -> Entry:
        """It has its turn; those before it in `next` have been passed."""
        entry, aged = self._entries[key], self._aged(now_s)
        for other in self.next(now_s):
            if other is entry:
                break
            other.passed += 1
        self._since_aged = 0 if entry is aged else min(AGED_EVERY, self._since_aged + 1)
        virtual = self._virtual[entry.priority]
        virtual.now = max(virtual.now, entry.start)
        virtual.finish = {tenant: at for tenant, at in virtual.finish.items() if at > virtual.now}
        self.remove(key)
        return entry

    def next(self, now_s: float) -> Iterator[Entry]:
        """Whom to try, in order. It ends after `LOOKAHEAD`, or with one that may not be passed again."""
        order = [self._entries[rank[3]] for rank in self._order[:LOOKAHEAD]]
        aged = self._aged(now_s)
        if aged is not None and self._since_aged >= AGED_EVERY - 1:
            order = [aged, *(entry for entry in order if entry is not aged)]
        for entry in order:
            yield entry
            if entry.passed >= MAX_PASSED:
                return

    def waits_before(self, priority: int) -> bool:
        """Whether a newcomer of that priority would have somebody before it."""
        return bool(self._order) and -self._order[0][0] >= priority

    def overdue(self, now_s: float) -> list[Entry]:
        """Those for whom waiting has become pointless."""
        return [entry for entry in self._entries.values() if now_s >= entry.until_s]

    def position_of(self, entry: Entry) -> int:
        """How many are before it."""
        return bisect_left(self._order, _rank(entry))

    def check_invariants(self) -> None:
        assert sorted(_rank(entry) for entry in self._entries.values()) == self._order
        assert all(entry.key == key and entry.passed <= MAX_PASSED for key, entry in self._entries.items())
        assert sum(virtual.count for virtual in self._virtual.values()) == len(self._entries)
        assert all(virtual.count > 0 for virtual in self._virtual.values())

    def _aged(self, now_s: float) -> Entry | None:
        """The oldest, if it has waited for `AGED_S`."""
        oldest = min(self._entries.values(), key=lambda entry: (entry.since_s, entry.key), default=None)
        return oldest if oldest is not None and now_s - oldest.since_s >= AGED_S else None


def _rank(entry: Entry) -> _Rank:
    return -entry.priority, entry.start, entry.since_s, entry.key
