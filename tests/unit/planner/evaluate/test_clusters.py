"""The planner's own code over simulated engines: goodput, what it learns, what it does about a slow worker."""

from __future__ import annotations

import random

import pytest

from isthmus_planner.evaluate import rules
from isthmus_planner.evaluate.calibration import ALL_WRONG, Wrong, learn
from isthmus_planner.evaluate.cluster import Cluster, Hook, Request
from isthmus_planner.evaluate.fleet import MIXES, capacity_per_s
from isthmus_planner.evaluate.planned import GuardedRule, Planner
from isthmus_planner.evaluate.ports import Ask
from isthmus_planner.evaluate.runs import run
from isthmus_shared.messages.route import Slo

CHAT = Slo(name="chat", ttft_s=1.0, itl_s=0.025)
SPLIT, FLEXIBLE, UNEVEN = MIXES


def load(mix_rate: float, count: int, seed: int = 1) -> tuple[Request, ...]:
    """Lengths like a chat's: log-normal around 800 and 150 tokens."""
    rng, now_s, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now_s += rng.expovariate(mix_rate)
        isl = min(8_000, max(16, round(rng.lognormvariate(6.7, 0.9))))
        osl = min(1_000, max(2, round(rng.lognormvariate(5.0, 0.7))))
        found.append(Request(now_s, isl, osl))
    return tuple(found)


def bound(mix_number: int) -> float:
    return capacity_per_s(MIXES[mix_number].workers(), 1_200, 190, 0.025)


def good(policy: Planner | rules.Rule, mix_number: int, asked: tuple[Request, ...]) -> int:
    return sum(record.good for record in run(MIXES[mix_number].workers(), policy, asked, CHAT))


@pytest.mark.parametrize("mix_number", [1, 2])
def test_more_requests_meet_their_targets_than_under_simple_rules(mix_number: int) -> None:
    specs = MIXES[mix_number].workers()
    asked = load(0.8 * bound(mix_number), 800)
    ours = good(Planner(), mix_number, asked)
    for make in (rules.round_robin, rules.least_loaded, lambda workers: rules.threshold(workers, 2048)):
        assert ours > 1.1 * good(make(specs), mix_number, asked)
        assert ours > good(GuardedRule(make(specs)), mix_number, asked)


def test_the_same_run_twice_is_the_same() -> None:
    asked = load(0.9 * bound(2), 400)
    first, second = (
        [(r.first_s, r.end_s, r.placed) for r in run(UNEVEN.workers(), Planner(), asked, CHAT)] for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("wrong", [ALL_WRONG[0], ALL_WRONG[5], ALL_WRONG[10], ALL_WRONG[15]], ids=lambda w: w.name)
def test_after_200_requests_predictions_from_constants_off_by_three_are_within_a_tenth(wrong: Wrong) -> None:
    learned = learn(SPLIT.workers(), load(0.3 * bound(0), 600, seed=3), wrong)
    assert learned.ttft == pytest.approx(1.0, abs=0.1)
    assert learned.itl == pytest.approx(1.0, abs=0.1)


def test_a_worker_that_becomes_slow_is_seen_within_ten_seconds_and_loses_traffic() -> None:
    slow, at_s = 5, 20.0
    planner = Planner(admits=False)
    seen: list[float] = []

    def look(cluster: Cluster, now_s: float) -> None:
        if now_s == at_s:
            cluster.slow_down(slow, 2.0)
        if not seen and planner.desk.drift.is_drifting(cluster.workers[slow].ref.incarnation):
            seen.append(now_s)

    cluster = Cluster.of(SPLIT.workers(), planner)
    asked = load(0.5 * bound(0), 3_500)
    cluster.run(
        asked,
        lambda number, request: Ask(number, request.isl_tokens, 2_048, None, "", request.at_s),
        [Hook(0.5, look)],
    )

    def share(since_s: float, until_s: float) -> float:
        placed = [r.placed.decode for r in cluster.records if r.placed and since_s <= r.placed_s < until_s]
        return placed.count(slow) / len(placed)

    assert asked[-1].at_s > at_s + 20
    assert seen
    assert at_s < seen[0] <= at_s + 10
    before, after = share(at_s - 10, at_s), share(at_s + 10, at_s + 20)
    assert before == pytest.approx(0.25, abs=0.08)
    assert after < 0.65 * before


def test_what_is_refused_is_told_when_to_come_back() -> None:
    records = run(FLEXIBLE.workers(), Planner(), load(2.0 * bound(1), 1_000), CHAT)
    refused = [record.refused for record in records if record.refused is not None]
    assert refused
    assert all(0.5 <= each.retry_after_s <= 60 for each in refused)
    assert sum(record.good for record in records) > 0.3 * len(records)
