"""Workers whose steps become slower than they were."""

from __future__ import annotations

import random

import pytest

from isthmus_planner.cost.online import StepCosts, StepEstimator, StepObservation
from isthmus_planner.drift import ACCEPT_BEATS, Drift
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.health import StepSample

LIFE = Incarnation("w")
TRUE = StepCosts(0.008, 0.0001, 2e-9, 30e-6)
BEATS_PER_S = 2


class Worker:
    def __init__(self, seed: int = 1) -> None:
        self.rng, self.estimator, self.drift = random.Random(seed), StepEstimator(TRUE), Drift()

    def beat(self, slowdown: float, *, batch: tuple[int, int] = (8, 32), prompts: bool = False) -> bool:
        steps = []
        for _ in range(8):
            sequences = self.rng.randint(*batch)
            kv_tokens = sequences * self.rng.randint(500, 3000)
            tokens = self.rng.choice((0, 0, 2048)) if prompts else 0
            step_s = slowdown * TRUE.step_s(sequences, kv_tokens, tokens) * self.rng.uniform(0.95, 1.05)
            self.estimator.observe(StepObservation(step_s, sequences, kv_tokens, tokens))
            steps.append(
                StepSample(step_s=step_s, decode_sequences=sequences, prefill_tokens=tokens, kv_tokens=kv_tokens)
            )
        return self.drift.beat(LIFE, self.estimator.live, steps)

    def beats_until(self, wanted: bool, slowdown: float, most: int = 100) -> int:
        for count in range(1, most + 1):
            if self.beat(slowdown) and self.drift.is_drifting(LIFE) is wanted:
                return count
        raise AssertionError(f"not within {most} beats")


@pytest.mark.parametrize("slowdown", [1.4, 1.6, 2.5])
@pytest.mark.parametrize("seed", range(5))
def test_a_worker_that_becomes_slower_is_seen_within_ten_seconds_and_so_is_its_recovery(
    slowdown: float, seed: int
) -> None:
    worker = Worker(seed)
    for _ in range(60):
        assert not worker.beat(1.0)
    assert worker.beats_until(True, slowdown) <= 10 * BEATS_PER_S
    assert worker.drift.slowdown(LIFE) > 1.2
    assert worker.beats_until(False, 1.0) <= 20 * BEATS_PER_S


def test_other_batches_and_prompts_are_no_drift() -> None:
    worker = Worker()
    for batch in ((1, 4), (100, 200), (8, 16), (1, 200)):
        for prompts in (False, True):
            for _ in range(60):
                worker.beat(1.0, batch=batch, prompts=prompts)
                assert not worker.drift.is_drifting(LIFE)


def test_one_slow_beat_is_no_drift() -> None:
    worker = Worker()
    for number in range(200):
        worker.beat(3.0 if number % 40 == 39 else 1.0)
        assert not worker.drift.is_drifting(LIFE)


def test_what_is_slower_for_good_becomes_the_usual() -> None:
    worker = Worker()
    for _ in range(30):
        worker.beat(1.0)
    worker.beats_until(True, 1.6)
    for _ in range(ACCEPT_BEATS + 1):
        worker.beat(1.6)
    assert not worker.drift.is_drifting(LIFE)
    assert worker.drift.slowdown(LIFE) == pytest.approx(1.0, abs=0.1)


def test_a_life_that_ends_is_forgotten_and_an_unknown_one_is_as_usual() -> None:
    worker = Worker()
    worker.beat(1.0)
    assert len(worker.drift) == 1
    worker.drift.keep([])
    assert len(worker.drift) == 0
    assert worker.drift.slowdown(LIFE) == 1.0
    assert not worker.drift.is_drifting(LIFE)
