"""What the planner has learned of each live worker's steps, from its heartbeats. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from isthmus_planner.cost.online import LiveCosts, StepCosts, StepEstimator, StepObservation
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.health import Role, StepSample, WorkerHeartbeat

STEADY_FADE = 0.99
"""With one step of each beat that is a memory of a minute or so: long enough for contexts to grow in it, so that what a
token of context costs can be told from what a sequence does, which the latest seconds alone never show."""

SHARE_STEP = 0.25
"""Of the newest beat in the share of time that prompts take: some two seconds count, and an idle worker's goes to 0."""


@dataclass(slots=True)
class _Learned:
    estimator: StepEstimator
    steady: StepEstimator
    model: str
    roles: tuple[Role, ...]
    steps_total: int = 0
    prompts_share: float = 0.0
    """Of the time lately, what prompts took."""


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
        learned = self._learned.get(beat.incarnation)
        if learned is None or learned.model != beat.model:  # it is new, or has loaded another model
            told = 0 if learned is None else learned.steps_total
            steady = StepEstimator(self._prior, fade=STEADY_FADE)
            learned = _Learned(StepEstimator(self._prior), steady, beat.model, beat.roles, told)
            self._learned[beat.incarnation] = learned
            self._live.pop(beat.incarnation, None)
        if learned.roles != beat.roles:
            # What its time went to in the other role says nothing of what it will go to.
            learned.roles, learned.prompts_share = beat.roles, 0.0
        new = beat.load.steps_total - learned.steps_total
        learned.steps_total = beat.load.steps_total
        samples = beat.load.steps if new < 0 else beat.load.steps[max(0, len(beat.load.steps) - new) :]
        for sample in samples:
            seen = StepObservation(sample.step_s, sample.decode_sequences, sample.kv_tokens, sample.prefill_tokens)
            learned.estimator.observe(seen)
            if sample is samples[-1]:
                learned.steady.observe(seen)
        if learned.estimator.seen:
            live = learned.estimator.live
            share = _prompts_s(samples, live.costs.per_prefill_token_s, new) / beat.interval_s
            learned.prompts_share += SHARE_STEP * (min(1.0, share) - learned.prompts_share)
            self._live[beat.incarnation] = replace(live, prefill_share=learned.prompts_share)
        return samples

    def steady(self) -> dict[Incarnation, LiveCosts]:
        """The same over a longer memory: for what lies beyond the present load, such as a full batch."""
        return {life: learned.steady.live for life, learned in self._learned.items() if learned.steady.seen}

    def keep(self, alive: Iterable[Incarnation]) -> None:
        wanted = set(alive)
        self._learned = {life: learned for life, learned in self._learned.items() if life in wanted}
        self._live = {life: live for life, live in self._live.items() if life in wanted}

    def live(self) -> Mapping[Incarnation, LiveCosts]:
        """Of those that have told of a step."""
        return MappingProxyType(self._live)


def _prompts_s(samples: Sequence[StepSample], per_token_s: float, steps: int) -> float:
    """What prompts took in so many steps, of which these are the ones that were told."""
    if not samples:
        return 0.0
    told_s = sum(min(sample.step_s, sample.prefill_tokens * per_token_s) for sample in samples)
    return told_s * max(1.0, steps / len(samples))
