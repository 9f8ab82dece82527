"""What the latest requests took, beside what the planner had predicted for them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from statistics import median

from isthmus_shared.messages.health import Foreseen

KEPT = 64
"""Requests that a median is taken over: few enough to show a change within a minute of moderate load."""

Pair = tuple[float, float]
"""Actual and predicted p50, seconds."""


class RecentLatencies:
    """One per ingress."""

    def __init__(self) -> None:
        self._ttft: deque[Pair] = deque(maxlen=KEPT)
        self._itl: deque[Pair] = deque(maxlen=KEPT)

    def first_token(self, actual_s: float, predicted_s: float) -> None:
        self._ttft.append((actual_s, predicted_s))

    def inter_token(self, actual_s: float, predicted_s: float) -> None:
        """The mean of one answer."""
        self._itl.append((actual_s, predicted_s))

    @property
    def ttft(self) -> Foreseen | None:
        return _foreseen(self._ttft)

    @property
    def itl(self) -> Foreseen | None:
        return _foreseen(self._itl)


def _foreseen(pairs: Collection[Pair]) -> Foreseen | None:
    if not pairs:
        return None
    return Foreseen(
        requests=len(pairs),
        actual_p50_s=median(actual_s for actual_s, _ in pairs),
        predicted_p50_s=median(predicted_s for _, predicted_s in pairs),
        error=median(abs(predicted_s / max(actual_s, 1e-9) - 1) for actual_s, predicted_s in pairs),
    )
