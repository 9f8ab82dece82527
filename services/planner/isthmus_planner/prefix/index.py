"""Which worker has how much of a prompt in its prefix cache. Pure, and bounded in memory.

A worker's hashes are a set. A prefix is there only with all shorter ones, so the longest of a prompt's is found by
bisection. Beyond a worker's share of the bound its hashes are kept in two generations: a route that looks one up moves
it (and all before it) into the young one; when that is full it becomes the old one, and what nobody asked for is
forgotten. An answer is therefore right or too small, as long as the worker's events are heard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.route import PREFIX_BLOCK_TOKENS

MAX_HASHES = 1_000_000
"""64 million cached tokens over all workers, in some 120 MB (`docs/prefix-cache.md`)."""


@dataclass(slots=True)
class _Held:
    young: set[bytes] = field(default_factory=set)
    old: set[bytes] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.young) + len(self.old)

    def has(self, prefix: bytes) -> bool:
        return prefix in self.young or prefix in self.old

    def depth(self, prefix: Sequence[bytes]) -> int:
        """How many of a prompt's hashes are here; the first one is."""
        low, high = 1, len(prefix)
        while low < high:
            middle = (low + high + 1) // 2
            if self.has(prefix[middle - 1]):
                low = middle
            else:
                high = middle - 1
        return low

    def renew(self, prefix: Sequence[bytes]) -> None:
        """Somebody asked for these."""
        if self.old and prefix[-1] not in self.young:
            asked = self.old.intersection(prefix)
            self.old -= asked
            self.young |= asked

    def add(self, hashes: Iterable[bytes], limit: int) -> None:
        """Each generation has half of the limit. When the young one is full, what nobody asked for since the last
        time is forgotten."""
        coming = iter(hashes)
        while True:
            some = list(islice(coming, max(1, limit // 2 - len(self.young))))
            if not some:
                return
            self.old.difference_update(some)
            self.young.update(some)
            self.fit(limit)

    def fit(self, limit: int) -> None:
        if len(self.young) >= max(1, limit // 2):
            self.young, self.old = set(), self.young
        if len(self) > limit:
            self.old = set(islice(self.old, max(0, limit - len(self.young))))


class PrefixIndex:
    """Implements `isthmus_planner.routing.types.CachedTokens`."""

    def __init__(self, *, max_hashes: int = MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._held: dict[Incarnation, _Held] = {}

    def __len__(self) -> int:
        """Hashes, each counted for every worker that has it."""
        return sum(len(held) for held in self._held.values())

    def cached_tokens(self, prefix: Sequence[bytes]) -> Mapping[Incarnation, int]:
        """By worker life, of those that have any. `prefix` is not empty. A hash for each worker, and for those that
        have it the logarithm of the prompt's length."""
        first = prefix[0]
        found: dict[Incarnation, int] = {}
        for life, held in self._held.items():
            if first in held.young or (held.old and first in held.old):
                depth = held.depth(prefix)
                held.renew(prefix[:depth])
                found[life] = depth * PREFIX_BLOCK_TOKENS
        return found

    def change(self, life: Incarnation, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        held = self._of(life)
        removed = set(removed)
        held.young -= removed
        held.old -= removed
        held.add(stored, self._limit)

    def replace(self, life: Incarnation, hashes: Iterable[bytes]) -> None:
        held = self._of(life)
        held.young, held.old = set(), set()
        held.add(hashes, self._limit)

    def forget(self, life: Incarnation) -> None:
        self._held.pop(life, None)

    def check_invariants(self) -> None:
        assert len(self) <= max(self._max_hashes, len(self._held)), "the index is over its bound"
        assert all(held.young.isdisjoint(held.old) for held in self._held.values())

    @property
    def _limit(self) -> int:
        """Of each worker."""
        return max(1, self._max_hashes // max(1, len(self._held)))

    def _of(self, life: Incarnation) -> _Held:
        held = self._held.get(life)
        if held is None:
            held = self._held[life] = _Held()
            for other in self._held.values():
                other.fit(self._limit)  # everyone's share is smaller now
        return held
