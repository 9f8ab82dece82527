"""What the planner has learned of each live worker's steps, from its heartbeats. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from isthmus_planner.cost.online import LiveCosts, StepCosts, StepEstimator, StepObservation
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.health import StepSample, WorkerHeartbeat


@dataclass(slots=True)
class _Learned:
    estimator: StepEstimator
    model: str
    steps_total: int = 0


class Estimates:
    """As many as there are workers: `keep` drops the lives that have ended."""

    def __init__(self, prior: StepCosts) -> None:
        self._prior = prior
        self._learned: dict[Incarnation, _Learned] = {}
        self._live: dict[Incarnation, LiveCosts] = {}

    def __len__(self) -> int:
        return len(self._learned)

    def beat(self, beat: WorkerHeartbeat) -> tuple[StepSample, ...]:
        """Learns from the steps that no earlier beat of that life has told, and returns them."""
        learned = self._learned.setdefault(beat.incarnation, _Learned(StepEstimator(self._prior), beat.model))
        if learned.model != beat.model:  # it has loaded another one
            learned.model, learned.estimator = beat.model, StepEstimator(self._prior)
            self._live.pop(beat.incarnation, None)
        new = beat.load.steps_total - learned.steps_total
        learned.steps_total = beat.load.steps_total
        samples = beat.load.steps if new < 0 else beat.load.steps[max(0, len(beat.load.steps) - new) :]
        for sample in samples:
            learned.estimator.observe(
                StepObservation(sample.step_s, sample.decode_sequences, sample.kv_tokens, sample.prefill_tokens)
            )
        if learned.estimator.seen:
            self._live[beat.incarnation] = learned.estimator.live
        return samples

    def keep(self, alive: Iterable[Incarnation]) -> None:
        wanted = set(alive)
        self._learned = {life: learned for life, learned in self._learned.items() if life in wanted}
        self._live = {life: live for life, live in self._live.items() if life in wanted}

    def live(self) -> Mapping[Incarnation, LiveCosts]:
        """Of those that have told of a step."""
        return MappingProxyType(self._live)
