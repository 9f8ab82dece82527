"""A token bucket: the bytes that leave in any window of t seconds are at most rate · t + burst."""

from __future__ import annotations

import math

_ROUNDING_BYTES = 0.5
"""Of the bucket's own sums; what the clock does not resolve comes on top. It stays owed, so it never adds up."""


class Pacer:
    """One per destination. `rate_bytes_per_s` may be `math.inf` (no pacing)."""

    def __init__(self, *, rate_bytes_per_s: float, burst_bytes: int, now_s: float) -> None:
        assert rate_bytes_per_s > 0
        assert burst_bytes > 0
        self._rate = rate_bytes_per_s
        self._burst = burst_bytes
        self._tokens = float(burst_bytes)
        self._at_s = now_s

    @property
    def rate(self) -> float:
        """In bytes per second."""
        return self._rate

    def ready_at_s(self, size_bytes: int, *, now_s: float) -> float:
        """The earliest time at which `size_bytes` (at most the burst) may leave."""
        assert size_bytes <= self._burst, "a chunk larger than the burst could never leave"
        missing = size_bytes - self._level(now_s)
        return now_s if missing <= self._slack_bytes(now_s) else now_s + missing / self._rate

    def spend(self, size_bytes: int, *, now_s: float) -> None:
        level = self._level(now_s) - size_bytes
        assert level >= -self._slack_bytes(now_s), "spent before it was ready"
        self._tokens, self._at_s = level, now_s

    def set_rate(self, rate_bytes_per_s: float, *, now_s: float) -> None:
        """From now on; what has been saved up stays."""
        assert rate_bytes_per_s > 0
        self._tokens, self._at_s = self._level(now_s), now_s
        self._rate = rate_bytes_per_s

    def _slack_bytes(self, now_s: float) -> float:
        """A clock of 1e6 s resolves 1e-10 s, which at 10 GB/s is a byte."""
        return _ROUNDING_BYTES + (0.0 if math.isinf(self._rate) else self._rate * math.ulp(now_s))

    def _level(self, now_s: float) -> float:
        if math.isinf(self._rate):
            return float(self._burst)
        return min(float(self._burst), self._tokens + self._rate * max(0.0, now_s - self._at_s))
