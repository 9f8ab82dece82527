"""Many seeds, over several processes: progress, failures with their smallest schedule, and what it took."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from isthmus_sim.plan import Plan, draw_plan, dumps
from isthmus_sim.shrinking import shrink
from isthmus_sim.simulation import run

PROGRESS_S = 30.0
MAX_SHOWN = 5
"""Problems of one run; the rest mostly follows from the first."""
MAX_SHRUNK = 5
"""Failures that are made small: a minute or two each."""
PER_TASK = 20


@dataclass(frozen=True)
class Failure:
    seed: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Batch:
    """What some seeds came to."""

    seeds: int
    failures: tuple[Failure, ...]
    faults: int
    requests: int
    relay_events: int
    world_s: float
    cpu_s: float


@dataclass(frozen=True)
class Summary:
    seeds: int
    first: int
    failures: tuple[Failure, ...]
    text: str


def run_seeds(first: int, count: int, *, jobs: int, say: Callable[[str], None]) -> Summary:
    """Runs those seeds; `say` is told of progress and failures as they come."""
    began_s = told_s = time.monotonic()
    done: list[Batch] = []
    for batch in _batches(first, count, jobs):
        done.append(batch)
        for failure in batch.failures:
            say(f"seed {failure.seed} FAILS: {failure.problems[0][:300]}")
        if time.monotonic() - told_s >= PROGRESS_S:
            told_s = time.monotonic()
            seeds = sum(each.seeds for each in done)
            failed = sum(len(each.failures) for each in done)
            say(f"{seeds} of {count} seeds, {failed} failed, {told_s - began_s:.0f} s")
    took_s = time.monotonic() - began_s
    failures = tuple(sorted((f for each in done for f in each.failures), key=lambda failure: failure.seed))
    text = (
        f"seeds={count} first={first} failed={len(failures)} faults={sum(each.faults for each in done)} "
        f"requests={sum(each.requests for each in done)} relay_events={sum(each.relay_events for each in done)} "
        f"virtual_s={sum(each.world_s for each in done):.0f} cpu_s={sum(each.cpu_s for each in done):.0f} "
        f"took_s={took_s:.0f} jobs={jobs}"
    )
    return Summary(count, first, failures, text)


def _batches(first: int, count: int, jobs: int) -> Iterator[Batch]:
    ranges = [range(start, min(start + PER_TASK, first + count)) for start in range(first, first + count, PER_TASK)]
    if jobs == 1:
        gc.freeze()
        yield from map(_run, ranges)
        return
    with ProcessPoolExecutor(jobs, initializer=gc.freeze) as pool:
        for future in as_completed([pool.submit(_run, each) for each in ranges]):
            yield future.result()


def _run(seeds: Sequence[int]) -> Batch:
    began_s = time.process_time()
    failures = []
    faults = requests = events = 0
    world_s = 0.0
    for seed in seeds:
        result = run(draw_plan(seed))
        faults += len(result.plan.faults)
        requests += len(result.plan.asks) + len(result.plan.late)
        events += result.relay_events
        world_s += result.world_s
        if result.problems:
            failures.append(Failure(seed, tuple(result.problems)))
    return Batch(len(seeds), tuple(failures), faults, requests, events, world_s, time.process_time() - began_s)


def explain(plan: Plan, problems: Sequence[str], say: Callable[[str], None], *, shrinking: bool = True) -> Plan:
    """Says what went wrong, and the smallest schedule that still does, as text and as a file's content for
    `isthmus sim --schedule`. Returns that schedule."""
    say(f"\nseed {plan.seed}:")
    for problem in problems[:MAX_SHOWN]:
        say(problem)
    if not shrinking:
        return plan
    small = shrink(plan, problems, lambda smaller: run(smaller).problems)
    say(f"\nsmallest schedule, after {small.tries} runs:")
    for line in small.plan.text():
        say(line)
    say(f"it leads to: {small.problems[0]}")
    say(f"\nas a file for `isthmus sim --schedule FILE`:\n{dumps(small.plan)}")
    say(f"the whole: isthmus sim --seed {plan.seed}")
    return small.plan


def default_jobs() -> int:
    return min(2, os.cpu_count() or 1)
