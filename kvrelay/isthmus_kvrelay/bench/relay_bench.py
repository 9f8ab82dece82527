"""Everything that `isthmus bench relay` measures, in one run, as JSON, Markdown and a plot."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from isthmus_kvrelay.bench import report
from isthmus_kvrelay.bench.burst import Burst, measure_bursts
from isthmus_kvrelay.bench.contenders import Contender, Limits, RelayContender, sockets
from isthmus_kvrelay.bench.hand_over import HandOver, measure_hand_overs
from isthmus_kvrelay.bench.transfer import Figures, measure
from isthmus_kvrelay.bench.workloads import KIB, WORKLOADS

PACED_RATES = (100e6, 500e6)
"""Bytes per second at which the pacer is held against a clock."""
PACED_S = 1.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Paced:
    rate_bytes_per_s: float
    measured_bytes_per_s: float

    @property
    def error(self) -> float:
        """-0.02 is two percent too slow."""
        return self.measured_bytes_per_s / self.rate_bytes_per_s - 1


@dataclass(frozen=True, slots=True)
class RelayBench:
    machine: dict[str, Any]
    transfers: Figures
    hand_overs: list[HandOver]
    paced: list[Paced]
    bursts: dict[str, Burst]

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def as_text(self) -> str:
        return "\n".join(
            (
                report.transfer_table(self.transfers),
                report.ratio_table(self.transfers),
                report.table(
                    ["shared memory, last block to ready", "p50 µs", "p99 µs"],
                    [
                        [f"{h.total_bytes // KIB} KiB", f"{h.p50_s * 1e6:.0f}", f"{h.p99_s * 1e6:.0f}"]
                        for h in self.hand_overs
                    ],
                ),
                report.table(
                    ["paced at, MB/s", "measured", "off by"],
                    [
                        [f"{p.rate_bytes_per_s / 1e6:.0f}", f"{p.measured_bytes_per_s / 1e6:.1f}", f"{p.error:+.1%}"]
                        for p in self.paced
                    ],
                ),
                report.burst_table(self.bursts),
            )
        )


def run(folder: Path, *, rounds: int, say: Say) -> RelayBench:
    """`folder`: for sockets; the caller removes it. Takes about half a minute a round, and a minute."""
    return RelayBench(
        machine=_machine(),
        transfers=measure(_contenders(folder), rounds=rounds, say=say),
        hand_overs=_hand_overs(_fresh(folder, "shm"), say),
        paced=[_paced(_fresh(folder, f"paced-{rate:.0f}"), rate, say) for rate in PACED_RATES],
        bursts=measure_bursts(folder, say=say),
    )


def _fresh(folder: Path, name: str) -> Path:
    place = folder / name
    place.mkdir()
    return place


def _contenders(folder: Path) -> dict[str, Callable[[], Contender]]:
    number = count()
    return {
        "one socket": lambda: sockets(1),
        "two sockets": lambda: sockets(2),
        "two sockets, unpaced": lambda: sockets(2, unpaced=True),
        "relay": lambda: RelayContender(_fresh(folder, f"r{next(number)}")),
        "relay, no checksums": lambda: RelayContender(_fresh(folder, f"r{next(number)}"), checksums=False),
        "relay and copies": lambda: RelayContender(_fresh(folder, f"r{next(number)}"), copies=True),
    }


def _machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def _hand_overs(folder: Path, say: Say) -> list[HandOver]:
    found = []
    for each in measure_hand_overs(folder):
        found.append(each)
        say(f"shared memory, {each.total_bytes // KIB} KiB: p50 {each.p50_s * 1e6:.0f} µs")
    return found


def _paced(folder: Path, rate: float, say: Say) -> Paced:
    """Long enough that the burst with which it begins no longer counts, and that is taken off besides."""
    relay = RelayContender(folder, settings={"ISTHMUS_RELAY_RATE_BYTES_PER_S": str(rate)})
    try:
        workload = WORKLOADS["64 x 16 x 64 KiB"]
        relay.intact(workload)
        before_s = time.perf_counter()
        transfers = relay.series(workload, Limits(PACED_S, 3, 1000))
        took_s = time.perf_counter() - before_s
    finally:
        relay.close()
    found = Paced(rate, workload.total_bytes * len(transfers) / took_s)
    say(f"paced at {rate / 1e6:.0f} MB/s: {found.error:+.1%}")
    return found
