"""The comparison: every trace, timing and hardware mix, under the planner and under each rule. Deterministic."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isthmus_planner.evaluate import rules
from isthmus_planner.evaluate.cluster import Cluster, Hook, Record, Request
from isthmus_planner.evaluate.fleet import MIXES, Mix, WorkerSpec, capacity_per_s
from isthmus_planner.evaluate.planned import GuardedRule, Planner
from isthmus_planner.evaluate.ports import Ask, Policy
from isthmus_planner.evaluate.rules import Rule
from isthmus_planner.evaluate.workload import TRACES, Lengths, Timing, Trace, read, requests
from isthmus_shared.messages.route import Slo

LOAD = 0.8
"""Of `capacity_per_s`, which nothing reaches: about what a good policy can just serve."""
SEED = 1
THRESHOLDS = (512, 1024, 2048, 4096, 8192)
USUAL_THRESHOLD = 2048
"""Without tuning; in the middle of those tried."""
MAX_OSL_TOKENS = 2048
"""What every client asks for at most; what comes is the trace's."""
PLANNER = "planner"
BEST_THRESHOLD = "best threshold"
"""Of the thresholds tried, the one that was best on this very run: tuned in hindsight."""

Specs = Sequence[WorkerSpec]


@dataclass(frozen=True, slots=True)
class Score:
    policy: str
    requests: int
    good: int
    refused: int
    ttft_errors: tuple[float, float]
    """(median of predicted over actual, median distance of it from 1); (0, 0) where nothing is predicted."""
    itl_errors: tuple[float, float]

    @property
    def share(self) -> float:
        return self.good / self.requests


@dataclass(slots=True)
class Cell:
    trace: str
    timing: Timing
    mix: str
    rate_per_s: float
    scores: dict[str, Score] = field(default_factory=dict)

    def ahead(self, of: str) -> float:
        """The planner's goodput over that policy's."""
        return self.scores[PLANNER].good / max(1, self.scores[of].good)


def run(
    specs: Specs, policy: Policy, asked: Sequence[Request], slo: Slo | None, hooks: Sequence[Hook] = ()
) -> list[Record]:
    cluster = Cluster.of(specs, policy)
    cluster.run(
        asked,
        lambda number, request: Ask(number, request.isl_tokens, MAX_OSL_TOKENS, slo, request.tenant, request.at_s),
        hooks,
    )
    return cluster.records


def compare(
    folder: Path,
    *,
    traces: Sequence[Trace] = TRACES,
    timings: Sequence[Timing] = tuple(Timing),
    mixes: Sequence[Mix] = MIXES,
    load: float = LOAD,
    seed: int = SEED,
) -> Iterator[Cell]:
    """ScenarioError: a trace cannot be read."""
    for trace in traces:
        lengths = read(folder, trace)
        for mix in mixes:
            for timing in timings:
                yield compare_one(mix, trace, lengths, timing, load=load, seed=seed)


def compare_one(mix: Mix, trace: Trace, lengths: Lengths, timing: Timing, *, load: float, seed: int) -> Cell:
    specs = mix.workers()
    itl_s = trace.slo.itl_s
    assert itl_s is not None
    rate_per_s = load * capacity_per_s(specs, lengths.mean_isl_tokens, lengths.mean_osl_tokens, itl_s)
    asked = requests(lengths, timing, rate_per_s, seed)
    cell = Cell(trace.name, timing, mix.name, rate_per_s)

    def play(policy: Policy) -> Score:
        score = score_of(policy.name, run(specs, policy, asked, trace.slo))
        cell.scores[score.policy] = score
        return score

    play(Planner(name=PLANNER))
    play(rules.round_robin(specs))
    play(rules.least_loaded(specs))
    tuned = {tokens: play(rules.threshold(specs, tokens)) for tokens in THRESHOLDS}
    best = max(tuned, key=lambda tokens: tuned[tokens].good)
    cell.scores[BEST_THRESHOLD] = tuned[best]
    guarded: tuple[Callable[[Specs], Rule], ...] = (
        rules.round_robin,
        rules.least_loaded,
        lambda workers: rules.threshold(workers, best),
    )
    for make in guarded:
        score = play(GuardedRule(make(specs)))
        if score.policy.startswith("threshold"):
            cell.scores[f"{BEST_THRESHOLD} + 429"] = score
    return cell


def score_of(policy: str, records: Sequence[Record]) -> Score:
    told = [r for r in records if r.refused is None and r.placed is not None and r.placed.predicted is not None]
    return Score(
        policy=policy,
        requests=len(records),
        good=sum(record.good for record in records),
        refused=sum(record.refused is not None for record in records),
        ttft_errors=errors([pair for record in told if (pair := ttft_pair(record)) is not None]),
        itl_errors=errors([pair for record in told if (pair := itl_pair(record)) is not None]),
    )


def ttft_pair(record: Record) -> tuple[float, float] | None:
    """(predicted, actual) from the moment that it was routed."""
    if record.placed is None or record.placed.predicted is None:
        return None
    return record.placed.predicted.ttft_p50_s, record.first_s - record.placed_s


def itl_pair(record: Record) -> tuple[float, float] | None:
    if record.placed is None or record.placed.predicted is None or record.osl_tokens < 2:
        return None
    return record.placed.predicted.itl_p50_s, record.itl_s


def errors(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(median of predicted over actual, median distance of that from 1)"""
    ratios = [predicted / actual for predicted, actual in pairs if actual > 0]
    if not ratios:
        return 0.0, 0.0
    return statistics.median(ratios), statistics.median(abs(ratio - 1.0) for ratio in ratios)
