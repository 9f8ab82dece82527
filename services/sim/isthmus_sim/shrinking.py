"""Makes a failing plan small: fewer faults, fewer requests, shorter, as long as it fails in the same way.

Greedy: each cut is tried on the smallest plan so far, until none helps or the tries are used up.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from isthmus_sim.cluster import Size
from isthmus_sim.faults import Planned
from isthmus_sim.load import Ask, prompt_of
from isthmus_sim.plan import Plan

MAX_TRIES = 300
"""Runs; at a third of a second each, under two minutes."""
_NUMBER = re.compile(r"\d+(\.\d+)?|(req|xfer)-[A-Za-z0-9_-]{12}|\[[^\]]*\]")
_KIND_CHARS = 300

T = TypeVar("T")
Run = Callable[[Plan], Sequence[str]]
"""Problems of a plan; none if it passes."""


@dataclass(frozen=True)
class Shrunk:
    plan: Plan
    problems: list[str]
    tries: int


def kind(problem: str) -> str:
    """What is left of a problem without numbers, ids and lists: two of one kind are one bug, as a rule."""
    return _NUMBER.sub("…", problem.strip().splitlines()[-1] if problem.strip() else "")[:_KIND_CHARS]


def shrink(plan: Plan, problems: Sequence[str], run: Run, *, max_tries: int = MAX_TRIES) -> Shrunk:
    """`problems`: what that plan led to. The result fails with one of their kinds."""
    kinds = {kind(problem) for problem in problems}
    best, found, tries = plan, list(problems), 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _cuts(best):
            if tries >= max_tries:
                return Shrunk(best, found, tries)
            tries += 1
            now = run(candidate)
            if any(kind(problem) in kinds for problem in now):
                best, found, smaller = candidate, list(now), True
                break
    return Shrunk(best, found, tries)


def _cuts(plan: Plan) -> Iterator[Plan]:
    """Plans that are smaller than this one, the largest cuts first."""
    for asks in _parts(plan.asks):
        yield dataclasses.replace(plan, asks=asks)
    for faults in _parts(plan.faults):
        yield dataclasses.replace(plan, faults=faults)
    if plan.late:
        yield dataclasses.replace(plan, late=())
    for size in _sizes(plan.size):
        yield dataclasses.replace(plan, size=size)
    for number, planned in enumerate(plan.faults):
        for shorter in _shorter_fault(planned):
            yield dataclasses.replace(plan, faults=_with(plan.faults, number, shorter))
    for number, ask in enumerate(plan.asks):
        for simpler in _simpler_ask(plan.seed, ask):
            yield dataclasses.replace(plan, asks=_with(plan.asks, number, simpler))


def _parts(items: tuple[T, ...]) -> Iterable[tuple[T, ...]]:
    """Without a half, a quarter, ... one of them."""
    width = len(items) // 2
    while width:
        for start in range(0, len(items), width):
            yield (*items[:start], *items[start + width :])
        width //= 2
    if len(items) == 1:
        yield ()


def _with(items: tuple[T, ...], number: int, item: T) -> tuple[T, ...]:
    return (*items[:number], item, *items[number + 1 :])


def _sizes(size: Size) -> Iterator[Size]:
    for change in ({"ingresses": 1}, {"planners": 1}, {"skew": 0.0}):
        smaller = dataclasses.replace(size, **change)
        if smaller != size:
            yield smaller


def _shorter_fault(planned: Planned) -> Iterator[Planned]:
    if planned.lasts_s > 0.05:
        yield dataclasses.replace(planned, lasts_s=round(planned.lasts_s / 2, 3))
    if planned.at_s != round(planned.at_s, 2):
        yield dataclasses.replace(planned, at_s=round(planned.at_s, 2))


def _simpler_ask(seed: int, ask: Ask) -> Iterator[Ask]:
    if ask.leaves_after_s is not None or ask.leaves_after_events is not None:
        yield dataclasses.replace(ask, leaves_after_s=None, leaves_after_events=None)
    if len(ask.prompt) > 1:
        yield dataclasses.replace(ask, prompt=prompt_of(seed, ask.sampling.seed, len(ask.prompt) // 2))
    if ask.sampling.max_tokens > 2:
        sampling = ask.sampling.model_copy(update={"max_tokens": ask.sampling.max_tokens // 2})
        yield dataclasses.replace(ask, sampling=sampling)
