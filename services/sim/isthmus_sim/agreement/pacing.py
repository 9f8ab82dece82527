"""Bursts of KV with and without a pace, where receiving takes host time from decode's steps.

The mechanism is `descriptor_posting`: 2.4 µs a post, and a descriptor for every 16 tokens of one layer's K or V on each
of 8 ranks (2 KiB). At a pace of r bytes per second it takes the share r · 0.15 ns of decode's time; all at once it
stops decode for as long as the whole prompt's posts take.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

from isthmus_planner.sim.hardware import DescriptorPosting, Relay
from isthmus_sim.agreement.measure import Case, Figures, by_services

POSTING = DescriptorPosting(post_s=2.4e-6, bytes_per_descriptor=2048, ranks=8)
PACES_BYTES_PER_S = (math.inf, 5e9, 2e9, 1e9)
"""The first is none: the wire's 25 GB/s."""


def paced(case: Case, paces: Iterable[float] = PACES_BYTES_PER_S) -> Iterator[tuple[float, Figures]]:
    """The case with that mechanism, at each pace of its lane."""
    decode = dataclasses.replace(case.decode, descriptor_posting=POSTING, transfer_stall=None, resident_kv=None)
    for pace in paces:
        lane = Relay(work_requests=None, pace_bytes_per_s=pace)
        yield pace, by_services(dataclasses.replace(case, decode=decode, lane=lane), seed=0)


def table(rows: list[tuple[float, Figures]]) -> str:
    lines = ["| pace | ITL mean ms | ITL p99 ms | E2EL p50 s |", "|---|---|---|---|"]
    for pace, figures in rows:
        name = "none" if math.isinf(pace) else f"{pace / 1e9:g} GB/s"
        lines.append(
            f"| {name} | {1e3 * figures.itl_mean_s:.2f} | {1e3 * figures.itl_p99_s:.2f} | {figures.e2el_p50_s:.2f} |"
        )
    return "\n".join(lines)
