"""Rounds over contenders, interleaved so that all see the same machine, and the medians and ratios of them."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from isthmus_kvrelay.bench.children import ChildFailed
from isthmus_kvrelay.bench.contenders import Contender, Limits
from isthmus_kvrelay.bench.workloads import WORKLOADS, Workload

IDLE_S = 1.0
THROUGHPUT = Limits(min_s=0.6, min_n=3, max_n=1000)
LATENCY = Limits(min_s=0.0, min_n=300, max_n=300)


@dataclass(slots=True)
class Series:
    """One contender's transfers of one workload in one round."""

    gb_per_s: float
    cpu_s_per_gb: float
    p50_us: float
    p99_us: float
    transfers: int


@dataclass(slots=True)
class Round:
    idle_cores: float = 0.0
    load_average: float = 0.0
    series: dict[str, Series] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    failed: str | None = None


Figures = dict[str, list[Round]]
"""Contender → its rounds."""


def measure_one(contender: Contender, workloads: Iterable[Workload], *, idle_s: float = IDLE_S) -> Round:
    found = Round(load_average=os.getloadavg()[0])
    for workload in workloads:
        if not contender.intact(workload):
            found.damaged.append(workload.name)
        limits = LATENCY if workload.latency else THROUGHPUT
        contender.series(workload, Limits(min_s=0, min_n=2, max_n=2))
        before_s = _cpu_s(contender)
        took_s = contender.series(workload, limits)
        cpu_s = _cpu_s(contender) - before_s
        moved_gb = workload.total_bytes * len(took_s) / 1e9
        cuts = statistics.quantiles(took_s, n=100, method="inclusive")
        found.series[workload.name] = Series(
            moved_gb / sum(took_s), cpu_s / moved_gb, cuts[49] * 1e6, cuts[98] * 1e6, len(took_s)
        )
    before_s = _cpu_s(contender)
    time.sleep(idle_s)
    found.idle_cores = (_cpu_s(contender) - before_s) / idle_s
    return found


def _cpu_s(contender: Contender) -> float:
    return sum(child.cpu_s() for child in contender.children)


def measure(
    contenders: Mapping[str, Callable[[], Contender]],
    *,
    rounds: int,
    workloads: Iterable[Workload] = tuple(WORKLOADS.values()),
    say: Callable[[str], None],
) -> Figures:
    """Each round starts each contender's processes anew, one contender after another."""
    figures: Figures = defaultdict(list)
    for number in range(rounds):
        for name, start in contenders.items():
            try:
                contender = start()
                try:
                    found = measure_one(contender, workloads)
                finally:
                    contender.close()
            except ChildFailed as error:
                found = Round(failed=str(error))
            figures[name].append(found)
            say(f"round {number + 1}/{rounds} {name}: {_summary(found)}")
    return dict(figures)


def _summary(found: Round) -> str:
    if found.failed is not None:
        return f"failed: {found.failed}"
    parts = [f"{name} {each.gb_per_s:.2f} GB/s {each.cpu_s_per_gb:.2f} s/GB" for name, each in found.series.items()]
    return "; ".join([*parts, f"idle {found.idle_cores:.2f}", *(f"DAMAGED {name}" for name in found.damaged)])


def median(rounds: Iterable[Round], workload: str, figure: str) -> float | None:
    values = [getattr(each.series[workload], figure) for each in rounds if workload in each.series]
    return statistics.median(values) if values else None


def ratio(figures: Figures, name: str, others: Iterable[str], workload: str, figure: str) -> float | None:
    """Median over rounds of `name`'s figure by the best of the others' in the same round.

    Best: the highest of GB/s, the lowest of all else.
    """
    best = max if figure == "gb_per_s" else min
    found = []
    for number, mine in enumerate(figures[name]):
        theirs = [figures[other][number].series.get(workload) for other in others]
        values = [getattr(each, figure) for each in theirs if each is not None]
        if workload in mine.series and values and best(values):
            found.append(getattr(mine.series[workload], figure) / best(values))
    return statistics.median(found) if found else None
