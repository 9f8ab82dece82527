"""What the simulated clusters are asked: public traces' lengths, at arrivals that are steady, bursty or recorded."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from isthmus_planner.evaluate.cluster import Request
from isthmus_planner.sim.traces import read_trace
from isthmus_shared.messages.route import Slo

BURST_PERIOD_S = 20.0
BURST_SHARE = 0.25
"""Of each period, at the front."""
BURST_RATE = 2.5
"""Times the mean; the rest of the period has what is left."""


class Timing(StrEnum):
    STEADY = "steady"
    """Poisson at a constant rate."""
    BURSTY = "bursty"
    """Poisson; a quarter of every 20 s at 2.5 times the mean rate, the rest at half of it."""
    RECORDED = "recorded"
    """The trace's own times, stretched to the rate."""


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    file: str
    requests: int
    slo: Slo


TRACES = (
    Trace("azure", "azure-2023-conversation.csv", 4000, Slo(name="chat", ttft_s=1.0, itl_s=0.025)),
    Trace("mooncake", "mooncake-2025-conversation.jsonl", 1600, Slo(name="long", ttft_s=5.0, itl_s=0.025)),
)
LONGEST_TOKENS = 100_000
"""Requests that no worker's context takes are left out."""


@dataclass(frozen=True, slots=True)
class Lengths:
    at_s: tuple[float, ...]
    isl_tokens: tuple[int, ...]
    osl_tokens: tuple[int, ...]

    @property
    def mean_isl_tokens(self) -> float:
        return sum(self.isl_tokens) / len(self.isl_tokens)

    @property
    def mean_osl_tokens(self) -> float:
        return sum(self.osl_tokens) / len(self.osl_tokens)


def read(folder: Path, trace: Trace) -> Lengths:
    """The first `trace.requests` of the file. ScenarioError: it cannot be read."""
    rows: list[tuple[float, int, int]] = []
    for batch in read_trace(folder / trace.file):
        for at_s, isl, osl in zip(batch.at_s, batch.isl_tokens, batch.osl_tokens, strict=True):
            if isl + osl <= LONGEST_TOKENS:
                rows.append((float(at_s), int(isl), int(osl)))
            if len(rows) == trace.requests:
                break
        if len(rows) == trace.requests:
            break
    at, isls, osls = zip(*rows, strict=True)
    return Lengths(at, isls, osls)


def requests(lengths: Lengths, timing: Timing, rate_per_s: float, seed: int) -> tuple[Request, ...]:
    """The trace's requests in their order, at `rate_per_s` in the mean."""
    times = _times(lengths, timing, rate_per_s, random.Random(seed))
    return tuple(
        Request(at_s, isl, osl) for at_s, isl, osl in zip(times, lengths.isl_tokens, lengths.osl_tokens, strict=True)
    )


def _times(lengths: Lengths, timing: Timing, rate_per_s: float, rng: random.Random) -> Iterator[float]:
    count = len(lengths.isl_tokens)
    if timing is Timing.RECORDED:
        span_s = lengths.at_s[-1] - lengths.at_s[0]
        return iter(_stretched(lengths.at_s, count / rate_per_s / span_s))
    if timing is Timing.STEADY:
        return iter(_poisson(count, rate_per_s, rng))
    return iter([_warped(work / rate_per_s) for work in _poisson(count, 1.0, rng)])


def _stretched(at_s: Sequence[float], factor: float) -> list[float]:
    return [(each - at_s[0]) * factor for each in at_s]


def _poisson(count: int, rate_per_s: float, rng: random.Random) -> list[float]:
    times, now_s = [], 0.0
    for _ in range(count):
        now_s += rng.expovariate(rate_per_s)
        times.append(now_s)
    return times


def _warped(mean_s: float) -> float:
    """When, with bursts, as much has come as by `mean_s` without."""
    periods, rest_s = divmod(mean_s, BURST_PERIOD_S)
    burst_s = BURST_SHARE * BURST_PERIOD_S
    slow = (1.0 - BURST_SHARE * BURST_RATE) / (1.0 - BURST_SHARE)
    in_burst_s = rest_s / BURST_RATE
    if in_burst_s > burst_s:
        in_burst_s = burst_s + (rest_s - burst_s * BURST_RATE) / slow
    return periods * BURST_PERIOD_S + in_burst_s
