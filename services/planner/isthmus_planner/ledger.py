"""Work routed since a worker's last beat, so that a burst does not all go to the one that looked idle. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from isthmus_planner.cost.speeds import Pending
from isthmus_shared.ids import Incarnation

SETTLE_S = 0.2
"""A beat shows an assignment once it was on its way this long: route reply, submit and admission take milliseconds."""
EXPIRY_S = 5.0
"""An assignment that no beat has covered by then is forgotten: its ingress may never have submitted it."""
MAX_ASSIGNMENTS = 65_536
"""Five seconds at 13,000 routes per second; beyond that the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class Assignment:
    incarnation: Incarnation
    at_s: float
    work: Pending


class Ledger:
    def __init__(self) -> None:
        self._open: deque[Assignment] = deque(maxlen=MAX_ASSIGNMENTS)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, incarnation: Incarnation, work: Pending, now_s: float) -> None:
        self._open.append(Assignment(incarnation, now_s, work))

    def beat(self, incarnation: Incarnation, now_s: float) -> None:
        """That worker's load is fresh: what it was given before now is in it."""
        self._keep([a for a in self._open if a.incarnation != incarnation or now_s - a.at_s < SETTLE_S], now_s)

    def forget(self, incarnation: Incarnation, now_s: float) -> None:
        self._keep([a for a in self._open if a.incarnation != incarnation], now_s)

    def pending(self, now_s: float) -> dict[Incarnation, Pending]:
        """The sum for each worker that has any."""
        sums: dict[Incarnation, Pending] = {}
        for assignment in self._open:
            if now_s - assignment.at_s > EXPIRY_S:
                continue
            had = sums.get(assignment.incarnation, Pending())
            sums[assignment.incarnation] = Pending(
                prefill_tokens=had.prefill_tokens + assignment.work.prefill_tokens,
                sequences=had.sequences + assignment.work.sequences,
                kv_blocks=had.kv_blocks + assignment.work.kv_blocks,
            )
        return sums

    def _keep(self, assignments: list[Assignment], now_s: float) -> None:
        self._open = deque((a for a in assignments if now_s - a.at_s <= EXPIRY_S), maxlen=MAX_ASSIGNMENTS)
