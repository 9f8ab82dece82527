"""The engine's latest steps, for the heartbeat: from them the planner learns what this worker's steps cost."""

from __future__ import annotations

from collections import deque

from isthmus_shared.engines.port import StepReport
from isthmus_shared.messages.health import MAX_STEP_SAMPLES, StepSample
from isthmus_shared.messages.work import MAX_COUNT, StepFacts


class StepCounter:
    """What the ingresses are told of each step, with its tokens."""

    def __init__(self, *, started_s: float) -> None:
        self._started_s, self._number = started_s, 0

    def facts(self, report: StepReport, *, now_s: float) -> StepFacts | None:
        """Call once for each report, in order; None for one that is no step."""
        if report.step_s <= 0:
            return None
        self._number += 1
        return StepFacts(
            number=self._number,
            ended_s=max(0.0, now_s - self._started_s),
            step_s=report.step_s,
            decode_sequences=report.decode_sequences,
            prefill_tokens=report.prefill_tokens,
            kv_loads=report.kv_loads,
        )


class StepLog:
    def __init__(self) -> None:
        self._samples: deque[StepSample] = deque(maxlen=MAX_STEP_SAMPLES)
        self._total = 0

    def note(self, report: StepReport, kv_tokens: int) -> None:
        """`kv_tokens`: in the engine's cache now. Reports without work (an abort, say) are no steps."""
        if report.step_s <= 0 or not (report.decode_sequences or report.prefill_tokens):
            return
        self._total = (self._total + 1) % MAX_COUNT
        self._samples.append(
            StepSample(
                step_s=report.step_s,
                decode_sequences=report.decode_sequences,
                prefill_tokens=report.prefill_tokens,
                kv_tokens=kv_tokens,
            )
        )

    def forget(self) -> None:
        """The engine was replaced: its steps say nothing of the next one's."""
        self._samples.clear()

    @property
    def total(self) -> int:
        """Steps noted since the start; tells a reader of two beats how many samples are new."""
        return self._total

    @property
    def samples(self) -> tuple[StepSample, ...]:
        """The latest, oldest first."""
        return tuple(self._samples)
