"""Counts of durations in buckets whose width grows with them (as HdrHistogram's): any percentile within 1 %."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

SUB_BITS = 7
"""Buckets for each doubling: 2^7, so that one is at most 1/128 wide."""
_SUB = 1 << SUB_BITS
UNIT_S = 1e-6


class Histogram:
    """Of seconds, from 1 µs on. Memory is for the buckets in use; two of them can be added."""

    __slots__ = ("_counts", "count", "max_s", "min_s", "total_s")

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.count, self.total_s = 0, 0.0
        self.min_s, self.max_s = float("inf"), 0.0

    def record(self, value_s: float, count: int = 1) -> None:
        self._counts[_bucket(int(value_s / UNIT_S))] += count
        self.count += count
        self.total_s += value_s * count
        self.min_s, self.max_s = min(self.min_s, value_s), max(self.max_s, value_s)

    def add(self, others: Iterable[Histogram]) -> Histogram:
        for other in others:
            self._counts.update(other._counts)
            self.count += other.count
            self.total_s += other.total_s
            self.min_s, self.max_s = min(self.min_s, other.min_s), max(self.max_s, other.max_s)
        return self

    @property
    def mean_s(self) -> float | None:
        return self.total_s / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The least value that so large a share is not above, as a bucket's middle; None of nothing."""
        if not self.count:
            return None
        rank, seen = max(1, math.ceil(share * self.count - 1e-9)), 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                low, high = _bounds(bucket)
                return min(self.max_s, max(self.min_s, (low + high) / 2 * UNIT_S))
        return self.max_s

    def share_below(self, bound_s: float) -> float:
        if not self.count:
            return 0.0
        last = _bucket(int(bound_s / UNIT_S))
        return sum(count for bucket, count in self._counts.items() if bucket <= last) / self.count

    def buckets(self) -> Iterator[tuple[float, int]]:
        """(upper bound in seconds, count), ascending."""
        for bucket in sorted(self._counts):
            yield _bounds(bucket)[1] * UNIT_S, self._counts[bucket]


def _bucket(units: int) -> int:
    if units < _SUB:
        return max(0, units)
    shift = units.bit_length() - SUB_BITS - 1
    return (shift << SUB_BITS) + (units >> shift)


def _bounds(bucket: int) -> tuple[int, int]:
    """[low, high) in units."""
    if bucket < _SUB:
        return bucket, bucket + 1
    shift = (bucket >> SUB_BITS) - 1
    low = (bucket - (shift << SUB_BITS)) << shift
    return low, low + (1 << shift)
