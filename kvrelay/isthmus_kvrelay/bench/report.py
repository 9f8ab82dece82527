"""Tables in Markdown of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from isthmus_kvrelay.bench.burst import FLOW_BYTES, FLOWS, Burst
from isthmus_kvrelay.bench.transfer import Figures, median, ratio
from isthmus_kvrelay.bench.workloads import MIB, WORKLOADS

YARDSTICK = ("one socket", "two sockets")
UNPACED = "two sockets, unpaced"
"""Beside the yardstick, whose sockets are as the host's default makes them: what of the ratio is congestion control."""
RELAY = "relay"
BULK = [workload.name for workload in WORKLOADS.values() if not workload.latency]
SMALL = [workload.name for workload in WORKLOADS.values() if workload.latency]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(columns), "|".join(["---"] * len(columns)), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines) + "\n"


def _text(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def transfer_table(figures: Figures) -> str:
    """Medians over the rounds."""
    bulk = [f"{name}, GB/s · CPU s/GB" for name in BULK]
    small = [f"{name}, p50 / p99 µs" for name in SMALL]
    rows = []
    for name, rounds in figures.items():
        row = [name]
        for workload in BULK:
            rate = median(rounds, workload, "gb_per_s")
            row.append(f"{_text(rate, 2)} · {_text(median(rounds, workload, 'cpu_s_per_gb'), 2)}")
        for workload in SMALL:
            p50, p99 = (median(rounds, workload, figure) for figure in ("p50_us", "p99_us"))
            row.append(f"{_text(p50, 0)} / {_text(p99, 0)}")
        damaged = any(each.damaged for each in rounds)
        failed = any(each.failed for each in rounds)
        idle = statistics.median(each.idle_cores for each in rounds)
        row += [f"{idle:.2f}", "FAILED" if failed else "NO" if damaged else "yes"]
        rows.append(row)
    return table(["contender", *bulk, *small, "idle cores", "intact"], rows)


def ratio_table(figures: Figures) -> str:
    """The relay by the best of others of the same round, medians: what the project promises, and whether it holds."""
    peers = {
        "the sockets": [name for name in YARDSTICK if name in figures],
        "the sockets, unpaced": [name for name in (UNPACED,) if name in figures],
    }
    for peer in ("NIXL", "Mooncake"):
        peers[peer] = [name for name in figures if name.startswith(peer)]
    rows = []
    for relay in [name for name in figures if name.startswith(RELAY)]:
        for peer, names in peers.items():
            if not names:
                continue
            row = [f"{relay} / {peer}"]
            for workload in BULK:
                rate = ratio(figures, relay, names, workload, "gb_per_s")
                cpu = ratio(figures, relay, names, workload, "cpu_s_per_gb")
                row.append(f"{_text(rate, 2)} · {_text(cpu, 2)}")
            for workload in SMALL:
                p50, p99 = (ratio(figures, relay, names, workload, figure) for figure in ("p50_us", "p99_us"))
                row.append(f"{_text(p50, 2)} / {_text(p99, 2)}")
            rows.append(row)
    bulk = [f"{name}, GB/s · CPU" for name in BULK]
    return table(["ratio", *bulk, *(f"{name}, p50 / p99" for name in SMALL)], rows)


def burst_table(bursts: Mapping[str, Burst]) -> str:
    rows = [
        [
            name,
            f"{each.quiet_p50_s * 1e3:.2f} / {each.quiet_p99_s * 1e3:.2f}",
            f"{each.burst_p50_s * 1e3:.2f} / {each.burst_p99_s * 1e3:.2f}",
            f"{each.p99_rise:+.0%}",
            f"{each.took_s:.2f}",
        ]
        for name, each in bursts.items()
    ]
    title = f"{FLOWS} prefills of {FLOW_BYTES // MIB} MiB at once"
    return table([title, "ITL alone, p50 / p99 ms", "under bursts", "p99 rises", "landed in s"], rows)
