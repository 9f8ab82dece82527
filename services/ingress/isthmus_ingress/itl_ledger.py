"""Why a stream's token was late: one ledger per stream. Pure; the rule is told in docs/tracing.md.

A gap is an excursion when it is above the target, or above twice the median of the stream's latest gaps and at least
`FLOOR_S` above it. Its time is divided into what passed at the worker within the step, at the worker outside it, and
on the bus; the largest excess names the cause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.quick import Facts

WINDOW = 32
"""Gaps that the median is of: about a second of a stream, so that it follows the load."""
RENEW_EVERY = 8
"""Gaps before there is a median, and between two computations of it, which would otherwise cost each token a sort."""
RATIO = 2.0
FLOOR_S = 0.005
"""Some ticks of a production loop's clock, which counts whole milliseconds."""


class Cause(StrEnum):
    HANDOVER = "handover"
    """The two tokens came from different workers: the request's own KV crossed, or it was planned anew."""
    TRANSFER = "transfer"
    """The step copied other sequences' KV in."""
    HEADROOM = "headroom"
    """The worker made steps without this sequence: it had no room for it."""
    BATCH = "batch"
    """The step held prefill, or more sequences than the one before."""
    STEP = "step"
    """The step took longer by itself."""
    HOST = "host"
    """The worker did something else between two steps."""
    BUS = "bus"
    """The worker was in time; the message, or its reader here, was not."""
    UNKNOWN = "unknown"
    """The worker said nothing of its steps."""


@dataclass(frozen=True, slots=True)
class Excursion:
    cause: Cause
    itl_s: float
    median_s: float
    """0 while there is none yet."""


class ItlLedger:
    def __init__(self, *, target_s: float = 0.0) -> None:
        """`target_s`: 0 is no target."""
        self._target_s = target_s
        self._gaps: deque[float] = deque(maxlen=WINDOW)
        self._seen = 0
        self._median_s = 0.0
        self.first_s: float | None = None
        self.last_s: float | None = None
        """When the first and the latest tokens came."""
        self._worker: Incarnation | None = None
        self._step: Facts | None = None

    def take(self, at_s: float, tokens: int, worker: Incarnation, step: Facts | None) -> Excursion | None:
        """`tokens` > 0 have come at `at_s`. What was late about them, if anything was."""
        last_s, last_worker, last_step = self.last_s, self._worker, self._step
        self.last_s, self._worker, self._step = at_s, worker, step
        if last_s is None:
            self.first_s = at_s
            return None
        gap_s, median_s = at_s - last_s, self._median_s
        itl_s = gap_s / tokens
        if worker == last_worker:  # a hand-over says nothing about what is usual
            self._add(itl_s)
            if itl_s < FLOOR_S and not self._target_s:
                return None  # as nearly all are
        above_usual = median_s > 0 and itl_s > RATIO * median_s and itl_s - median_s >= FLOOR_S
        if not above_usual and not 0 < self._target_s < itl_s:
            return None
        if worker != last_worker:
            cause = Cause.HANDOVER
        elif step is None or last_step is None:
            cause = Cause.UNKNOWN
        else:
            usual_s = min((bound_s for bound_s in (median_s, self._target_s) if bound_s), default=0.0)
            cause = _cause(gap_s, step, last_step, usual_s=usual_s * tokens)
        return Excursion(cause, itl_s, median_s)

    def more_at_once(self, count: int, step: Facts | None) -> None:
        """Of the same worker, `count` further takes of the same moment, the last with `step`: none of them is late."""
        if count == 0:
            return
        self._step = step
        self._seen += count
        after = min(count, self._seen % RENEW_EVERY)  # the last renewal
        self._gaps.extend([0.0] * (count - after))
        if count > after:
            self._median_s = median(self._gaps)
        self._gaps.extend([0.0] * after)

    def _add(self, itl_s: float) -> None:
        self._gaps.append(itl_s)
        self._seen += 1
        if self._seen % RENEW_EVERY == 0:
            self._median_s = median(self._gaps)


def median(values: Iterable[float]) -> float:
    """`statistics.median`'s, of some; without its care for other kinds of number, which costs more than the sort."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _cause(gap_s: float, step: Facts, last: Facts, *, usual_s: float) -> Cause:
    """Of a gap between two steps of one worker. `usual_s`: what a step of it may well take."""
    worker_s = max(0.0, step.ended_s - last.ended_s)
    within_s = step.step_s - usual_s
    outside_s = worker_s - step.step_s
    bus_s = gap_s - worker_s
    if bus_s >= max(within_s, outside_s):
        return Cause.BUS
    if outside_s > within_s:
        return Cause.HEADROOM if step.number > last.number + 1 else Cause.TRANSFER if step.kv_loads else Cause.HOST
    if step.kv_loads:
        return Cause.TRANSFER
    grew = step.prefill_tokens > 0 or step.decode_sequences > last.decode_sequences
    return Cause.BATCH if grew else Cause.STEP
