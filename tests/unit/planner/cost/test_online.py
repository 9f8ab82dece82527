from __future__ import annotations

import dataclasses
import math
import random

import pytest

from isthmus_planner.cost.online import StepCosts, StepEstimator, StepObservation

TRUTH = StepCosts(base_s=8e-3, per_sequence_s=60e-6, per_kv_token_s=40e-9, per_prefill_token_s=30e-6)


def off(*factors: float) -> StepCosts:
    return StepCosts(
        TRUTH.base_s * factors[0],
        TRUTH.per_sequence_s * factors[1],
        TRUTH.per_kv_token_s * factors[2],
        TRUTH.per_prefill_token_s * factors[3],
    )


def steps(truth: StepCosts, count: int, *, seed: int = 1, noise: float = 0.03) -> list[StepObservation]:
    """A worker whose load wanders; every fourth step has a piece of a prompt in it."""
    generator, batch = random.Random(seed), 16
    seen = []
    for index in range(count):
        batch = min(64, max(1, batch + generator.randint(-3, 3)))
        kv = batch * generator.randint(200, 2000)
        prompt = generator.choice((128, 256, 512)) if index % 4 == 0 else 0
        took = truth.step_s(batch, kv, prompt) * math.exp(noise * generator.gauss(0, 1))
        seen.append(StepObservation(took, batch, kv, prompt))
    return seen


USUAL = [(8, 8000, 0), (16, 16_000, 0), (32, 40_000, 0), (16, 16_000, 512)]
EVERYWHERE = [*USUAL, (4, 4000, 0), (48, 60_000, 0), (0, 0, 512)]


def worst_error(estimator: StepEstimator, truth: StepCosts, places: list[tuple[int, int, int]] = EVERYWHERE) -> float:
    costs = estimator.live.costs
    return max(abs(costs.step_s(*at) / truth.step_s(*at) - 1) for at in places)


@pytest.mark.parametrize(
    "factors", [(3, 3, 3, 3), (1 / 3, 1 / 3, 1 / 3, 1 / 3), (3, 1 / 3, 3, 1 / 3), (1 / 3, 3, 1 / 3, 3)]
)
@pytest.mark.parametrize("seed", range(4))
def test_constants_off_by_three_are_right_within_a_tenth_after_200_steps(
    factors: tuple[float, float, float, float], seed: int
) -> None:
    estimator = StepEstimator(off(*factors))
    assert worst_error(estimator, TRUTH) > 0.5
    for seen in steps(TRUTH, 200, seed=seed):
        estimator.observe(seen)
        estimator.check_invariants()
    assert worst_error(estimator, TRUTH) < 0.1
    assert estimator.live.decode_seen == 200
    assert estimator.live.prefill_seen == 50


def test_an_outlier_does_not_move_it() -> None:
    estimator = StepEstimator(off(3, 3, 3, 3))
    for seen in steps(TRUTH, 200):
        estimator.observe(seen)
    before = estimator.live
    taken = [
        estimator.observe(StepObservation(TRUTH.step_s(16, 16_000) * factor, 16, 16_000, 0))
        for factor in (50, 20, 0.05, 100, 10)
    ]
    assert taken == [False] * 5
    assert estimator.live == before


def test_outliers_spread_over_the_run_do_not_move_it() -> None:
    estimator = StepEstimator(off(3, 1 / 3, 3, 1 / 3))
    for index, seen in enumerate(steps(TRUTH, 300)):
        slow = 30.0 if index % 10 == 7 and index > 20 else 1.0
        estimator.observe(
            StepObservation(seen.step_s * slow, seen.decode_sequences, seen.kv_tokens, seen.prefill_tokens)
        )
    assert worst_error(estimator, TRUTH) < 0.1


def test_a_slow_drift_is_followed() -> None:
    estimator = StepEstimator(TRUTH)
    for seen in steps(TRUTH, 200):
        estimator.observe(seen)
    for index, seen in enumerate(steps(TRUTH, 400, seed=2)):
        drift = 1 + index / 400
        estimator.observe(dataclasses.replace(seen, step_s=seen.step_s * drift))
    assert worst_error(estimator, off(2, 2, 2, 2), USUAL) < 0.12, "a drift to twice the time, within 400 steps"


@pytest.mark.parametrize("factor", [3.0, 0.4])
def test_a_worker_that_suddenly_changed_is_believed_within_some_dozen_steps(factor: float) -> None:
    estimator = StepEstimator(TRUTH)
    for seen in steps(TRUTH, 200):
        estimator.observe(seen)
    changed = off(factor, factor, factor, factor)
    for seen in steps(changed, 60, seed=3):
        estimator.observe(seen)
    assert worst_error(estimator, changed) < 0.15


def test_what_is_no_longer_seen_goes_back_to_the_prior_and_not_astray() -> None:
    estimator = StepEstimator(off(1, 1, 1, 3))
    for seen in steps(TRUTH, 200):
        estimator.observe(seen)
    for _ in range(5000):
        estimator.observe(StepObservation(TRUTH.step_s(8, 8000), 8, 8000, 0))
    costs = estimator.live.costs
    assert costs.step_s(8, 8000) == pytest.approx(TRUTH.step_s(8, 8000), rel=0.01)
    assert TRUTH.per_prefill_token_s <= costs.per_prefill_token_s <= 3 * TRUTH.per_prefill_token_s * 1.01


def test_no_cost_becomes_negative_even_when_steps_grow_faster_with_fewer_sequences() -> None:
    estimator = StepEstimator(TRUTH)
    for index in range(300):
        batch = 1 + index % 32
        estimator.observe(StepObservation(0.02 - batch * 2e-4, batch, batch * 500, 0))
        estimator.check_invariants()
    assert estimator.live.costs.step_s(1, 0) >= 0


@pytest.mark.parametrize("step_s", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_measurement_teaches_nothing(step_s: float) -> None:
    estimator = StepEstimator(TRUTH)
    before = estimator.live
    assert not estimator.observe(StepObservation(step_s, 4, 1000, 0))
    assert not estimator.observe(StepObservation(0.01, 0, 1000, 0))
    assert estimator.live == before


def test_the_spread_follows_the_scatter() -> None:
    quiet, loud = StepEstimator(TRUTH), StepEstimator(TRUTH)
    for a, b in zip(steps(TRUTH, 200, noise=0.01), steps(TRUTH, 200, noise=0.15), strict=True):
        quiet.observe(a)
        loud.observe(b)
    assert quiet.live.spread < 1.04
    assert 1.1 < loud.live.spread < 1.5
