"""How fast one destination is sent to: a ceiling, and below it a rate that its decode's inter-token latency sets.

Additive increase, multiplicative decrease. The receiver reports its measured ITL and its target; the sender cuts its
rate when the first exceeds the second, and lets it grow back linearly when it does not or when nobody reports any more.
"""

from __future__ import annotations

import math

DECREASE = 0.7
"""Of the rate remains after a report above the target. Halving overshoots, since ITL also has causes other than us;
two reports with 0.7 halve it all the same."""
HOLD_S = 0.1
"""No second decrease within it: what is under way and the steps in progress must show the first one's effect."""
RECOVERY_S = 2.0
"""From nothing to the ceiling: slow against decode steps (5 to 50 ms), fast against a transfer's deadline."""
STALE_S = 1.0
"""Without a report for so long, nothing decodes there: the rate grows as after a good one."""
FLOOR = 0.02
"""Of the ceiling (or of what was measured): a flow always goes on, and reports of other causes cannot stop us."""
MAX_GAP_S = 0.25
"""One report counts for at most so much time of growth."""


class Aimd:
    """Rates in bytes per second. A ceiling of `math.inf`: what was measured at the first decrease stands in for it."""

    def __init__(self, *, ceiling: float, now_s: float) -> None:
        assert ceiling > 0
        self._ceiling = ceiling
        self._reference = ceiling
        self._rate = ceiling
        self._reported_s = now_s
        self._grown_s = now_s
        self._cut_s = -math.inf
        self.decreases = 0

    @property
    def rate(self) -> float:
        return self._rate

    @property
    def ceiling(self) -> float:
        return self._ceiling

    def set_ceiling(self, ceiling: float, *, now_s: float) -> None:
        """The planner's or the operator's word: at once when it falls, by recovery when it rises after a decrease."""
        assert ceiling > 0
        if ceiling == self._ceiling:
            return
        held_back = self._rate < self._ceiling
        self._ceiling = self._reference = ceiling
        self._rate = min(self._rate, ceiling) if held_back and math.isfinite(ceiling) else ceiling
        self._grown_s = now_s

    def report(self, *, itl_s: float, target_s: float, measured: float, now_s: float) -> None:
        """`measured`: bytes per second that went there since the last report."""
        self._reported_s = now_s
        if itl_s > target_s:
            self._grown_s = now_s
            if now_s - self._cut_s >= HOLD_S:
                self._decrease(measured, now_s)
        else:
            self._grow(now_s)

    def look_again_s(self) -> float | None:
        """When `lapse` has something to do; None: never, since the rate is at its ceiling."""
        if self._rate >= self._ceiling:
            return None
        return max(self._reported_s + STALE_S, self._grown_s + MAX_GAP_S)

    def lapse(self, *, now_s: float) -> None:
        again_s = self.look_again_s()
        if again_s is not None and again_s <= now_s:
            self._grow(now_s)

    def _decrease(self, measured: float, now_s: float) -> None:
        if math.isinf(self._rate):
            if measured <= 0:
                return  # we send nothing: not our doing
            self._reference = self._rate = measured
        self._rate = max(self._rate * DECREASE, self._reference * FLOOR)
        self._cut_s = now_s
        self.decreases += 1

    def _grow(self, now_s: float) -> None:
        gap_s, self._grown_s = min(MAX_GAP_S, now_s - self._grown_s), now_s
        if self._rate >= self._ceiling:
            return
        self._rate = min(self._ceiling, self._rate + self._reference * gap_s / RECOVERY_S)
        if math.isinf(self._ceiling) and self._rate >= 2 * self._reference:
            self._rate = self._reference = math.inf  # the link's own limit holds again
