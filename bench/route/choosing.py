"""The choice alone, timed call by call."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from workers import relay, request, worker

from isthmus_planner.cost.speeds import prior_costs
from isthmus_planner.estimates import Estimates
from isthmus_planner.garbage import look_less_often
from isthmus_planner.routing.choose import choose
from isthmus_planner.routing.explain import Explanations
from isthmus_planner.routing.policy import Policy
from isthmus_planner.routing.refusing import Known
from isthmus_planner.routing.view import View
from isthmus_shared.ids import Incarnation

PLANNER = Incarnation("bench")
WARM_ROUTES = 50


@dataclasses.dataclass(frozen=True, slots=True)
class Choosing:
    workers: int
    targets: bool
    p50_us: float
    p99_us: float
    cpu_p50_us: float
    cpu_p99_us: float
    commit_us: float
    beat_us: float
    explain_us: float
    """What remembering the choice costs on top of choosing: medians of the two apart."""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class _Timer:
    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def time(self, call: Callable[[], Any]) -> Any:
        cpu, wall = time.thread_time(), time.perf_counter()
        found = call()
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        self.wall.append(wall * 1e6)
        self.cpu.append(cpu * 1e6)
        return found


def choosing(workers: int, routes: int, *, targets: bool) -> Choosing:
    rng = random.Random(workers)
    view, estimates = View(Policy()), Estimates(prior_costs(Policy().constants))

    def beat(index: int, now_s: float, told: int) -> None:
        heard = worker(index, rng, told)
        estimates.beat(heard)
        view.beat(heard, now_s, estimates.live()[heard.incarnation])

    for index in range(workers):
        for told in (8, 16):
            beat(index, 0.0, told)
        view.relay(relay(index, 0), 0.0)
    look_less_often()  # as the planner's process does
    chosen, committed, beaten, remembered = _Timer(), _Timer(), _Timer(), _Timer()
    explanations = Explanations(PLANNER)
    for number in range(routes + WARM_ROUTES):
        if number == WARM_ROUTES:
            chosen, committed, beaten, remembered = _Timer(), _Timer(), _Timer(), _Timer()
        now_s = 0.001 * number
        asked = request(number, rng, targets=targets)
        choice = chosen.time(lambda: choose(asked, view, _known, PLANNER, now_s))  # noqa: B023
        remembered.time(lambda: explanations.choose(asked, view, _known, now_s))  # noqa: B023
        committed.time(lambda: view.commit(choice, now_s))  # noqa: B023
        heard = worker(rng.randrange(workers), rng, 16 + 8 * number)
        beaten.time(lambda: view.beat(heard, now_s))  # noqa: B023
    return Choosing(
        workers=workers,
        targets=targets,
        p50_us=statistics.median(chosen.wall),
        p99_us=_p99(chosen.wall),
        cpu_p50_us=statistics.median(chosen.cpu),
        cpu_p99_us=_p99(chosen.cpu),
        commit_us=statistics.median(committed.cpu),
        beat_us=statistics.median(beaten.cpu),
        explain_us=statistics.median(remembered.cpu) - statistics.median(chosen.cpu),
    )


def _known() -> Known:
    return Known(frozenset(), warm=True)


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]
