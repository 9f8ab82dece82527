"""How fast the simulator is on one core, what it takes to start, and whether its memory grows with the requests.

    python bench/simulator.py [--rounds 3] [--json FILE]

Rates are requests per CPU second of this process and, beside it, per second of wall clock: on a machine that does other
things only the first means something. Starting is measured in processes of their own, with an empty and with a full
cache of compiled code; memory is the peak of such a process, for 100,000 and for ten times as many requests.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from isthmus_planner.sim.hardware import DecodeTable, Node, PrefillTable, Relay, Role
from isthmus_planner.sim.scenario import Scenario
from isthmus_planner.sim.simulate import simulate
from isthmus_planner.sim.workload import Arrivals, ClosedLoop, Lengths, Poisson, Stream

CASES: dict[str, tuple[int, Arrivals, tuple[int, int], int, float | None]] = {
    "1 + 1, 1K/1K, C 32": (1, ClosedLoop(32), (1024, 1024), 400_000, 200_000),
    "1 + 1, 1K/1K, C 256": (1, ClosedLoop(256), (1024, 1024), 400_000, 200_000),
    "1 + 1, 1K/1K, Poisson 20/s": (1, Poisson(20.0), (1024, 1024), 400_000, 200_000),
    "64 + 64, 1K/1K, C 2048": (64, ClosedLoop(2048), (1024, 1024), 100_000, 20_000),
    "64 + 64, 1K/1K, Poisson 1000/s": (64, Poisson(1000.0), (1024, 1024), 100_000, 20_000),
    "64 + 64, mixed lengths, C 2048": (64, ClosedLoop(2048), (0, 0), 100_000, 20_000),
}
"""Nodes of each role; arrivals; ISL and OSL (0: 100 to 2000); requests; the requests per second that are asked for."""


def scenario(nodes: int, arrivals: Arrivals, lengths: tuple[int, int], requests: int) -> Scenario:
    """An H100's and an MI300X's laws for a model of 120 B parameters, about."""
    prefill = PrefillTable(0.005, 1.2e-5, 1e-10, 0.004, 1e-6)
    decode = DecodeTable(tuple(0.004 + 2e-5 * batch for batch in range(1, 513)), 1.2e-9)
    sends = [
        Node(f"p{n}", Role.PREFILL, 1_000_000, prefill, kv_bytes_per_token=73_728, link_bytes_per_s=50e9)
        for n in range(nodes)
    ]
    takes = [Node(f"d{n}", Role.DECODE, 2_000_000, decode=decode, link_bytes_per_s=50e9) for n in range(nodes)]
    isl, osl = (Lengths.constant(length) if length else Lengths.uniform(100, 2000) for length in lengths)
    stream = Stream(arrivals, requests, isl, osl)
    return Scenario((*sends, *takes), (stream,), Relay(setup_s=0.001, pace_bytes_per_s=10e9))


def rate(case: str) -> dict[str, float]:
    nodes, arrivals, lengths, requests, _ = CASES[case]
    asked = scenario(nodes, arrivals, lengths, requests)
    wall, cpu = time.perf_counter(), time.process_time()
    result = simulate(asked)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert result.stream.completed == requests
    return {
        "requests_per_cpu_s": requests / cpu,
        "requests_per_s": requests / wall,
        "events_per_request": result.events / requests,
    }


def child(requests: int, cache: str) -> dict[str, float]:
    """One simulation in a process of its own, from its start to its result."""
    wall = time.perf_counter()
    command = [sys.executable, __file__, "--child", str(requests)]
    done = subprocess.run(command, check=True, capture_output=True, env=os.environ | {"NUMBA_CACHE_DIR": cache})
    return json.loads(done.stdout) | {"wall_s": time.perf_counter() - wall}


def be_child(requests: int) -> None:
    nodes, arrivals, lengths, _, _ = CASES["1 + 1, 1K/1K, C 32"]
    simulate(scenario(nodes, arrivals, lengths, requests))
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"cpu_s": used.ru_utime + used.ru_stime, "peak_mib": used.ru_maxrss / 1024}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        be_child(options.child)
        return
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as cache:
        found["start, empty cache"] = child(1000, cache)
        found["start, full cache"] = child(1000, cache)
        found["100,000 requests"] = child(100_000, cache)
        found["1,000,000 requests"] = child(1_000_000, cache)
    for name, figures in found.items():
        print(f"{name:34} {figures['cpu_s']:8.2f} CPU s {figures['wall_s']:8.2f} s {figures['peak_mib']:8.1f} MiB peak")
    simulate(scenario(1, ClosedLoop(1), (10, 10), 1))
    for case, (*_, asked) in CASES.items():
        rounds = [rate(case) for _ in range(options.rounds)]
        found[case] = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        print(
            f"{case:34} {found[case]['requests_per_cpu_s']:10,.0f} requests per CPU s "
            f"{found[case]['requests_per_s']:10,.0f} per s {found[case]['events_per_request']:6.2f} events each"
            f"   (asked: {asked:,.0f})"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
