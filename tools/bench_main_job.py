"""The main job's figures on this machine: start to first token, TTFT, ITL and throughput, for three ways of serving.

python tools/bench_main_job.py [--rounds 3] [--json FILE]

Each round starts a fresh local cluster for each way in turn (KV over TCP between two nodes, over shared memory on
one node, and aggregated on the decode worker), drives it with streamed completions, and stops it; the ways are
interleaved so that they see the same machine. Medians over the rounds are printed. Run it when nothing else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from isthmus_shared.engines.reference.checkpoint import ensure_tiny_checkpoint

WAYS = {
    "tcp": ("--mode", "disaggregated"),
    "shm": ("--mode", "disaggregated", "--same-node"),
    "aggregated": ("--mode", "aggregated"),
}
SCENARIOS = (("ISL 64, OSL 64", 64, 64), ("ISL 1000, OSL 64", 1000, 64), ("ISL 4000, OSL 16", 4000, 16))
CONCURRENCIES = (1, 8)
REQUESTS_PER_CLIENT = 3
START_TIMEOUT_S = 120.0
BYTE_TOKENS = 256
"""The model's first 256 tokens are the bytes: any of them is a valid prompt."""


@dataclass
class Timings:
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True)
class Cluster:
    process: subprocess.Popen[str]
    url: str
    model: str
    started_s: float
    """From the command to readiness."""


def start(way: str, state_dir: Path) -> Cluster:
    """`isthmus up` with that way's options and the seeded model, ready to serve."""
    model = ensure_tiny_checkpoint(state_dir / "models" / "tiny")
    command = [sys.executable, "-m", "isthmus_cli", "up", "--port", "0", "--json", "--state-dir", str(state_dir)]
    command += ["--model", str(model)]
    began_s = time.perf_counter()
    process = subprocess.Popen([*command, *WAYS[way]], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "ready":
            state = json.loads((state_dir / "cluster.json").read_text())
            return Cluster(process, state["http_url"], state["model"], time.perf_counter() - began_s)
    raise SystemExit(f"the {way} cluster did not start; see {state_dir}/logs")


def stop(cluster: Cluster) -> None:
    cluster.process.send_signal(signal.SIGINT)
    cluster.process.communicate(timeout=START_TIMEOUT_S)


async def one_request(client: httpx.AsyncClient, model: str, prompt: list[int], osl: int, into: Timings) -> None:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": osl,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s = last_s = time.perf_counter()
    seen = 0
    async with client.stream("POST", "completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk: dict[str, Any] = json.loads(line[6:])
            if "error" in chunk:
                raise SystemExit(f"a request failed: {chunk['error']}")
            if chunk["usage"]:
                into.tokens += chunk["usage"]["completion_tokens"]
            elif chunk["choices"][0]["finish_reason"] is None:
                now_s = time.perf_counter()
                (into.itl_s if seen else into.ttft_s).append(now_s - last_s if seen else now_s - began_s)
                last_s, seen = now_s, seen + 1


async def drive(cluster: Cluster, isl: int, osl: int, clients: int, seed: int) -> dict[str, float]:
    """`clients` closed loops of `REQUESTS_PER_CLIENT` requests each."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(BYTE_TOKENS) for _ in range(isl)] for _ in range(clients * REQUESTS_PER_CLIENT)]
    timings = Timings()
    async with httpx.AsyncClient(base_url=f"{cluster.url}/v1/", timeout=START_TIMEOUT_S) as client:

        async def loop(mine: list[list[int]]) -> None:
            for prompt in mine:
                await one_request(client, cluster.model, prompt, osl, timings)

        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for index in range(clients):
                group.create_task(loop(prompts[index::clients]))
        took_s = time.perf_counter() - began_s
    return {
        "ttft_p50_ms": statistics.median(timings.ttft_s) * 1e3,
        "itl_p50_ms": statistics.median(timings.itl_s) * 1e3,
        "itl_p99_ms": statistics.quantiles(timings.itl_s, n=100)[98] * 1e3,
        "output_tokens_per_s": timings.tokens / took_s,
    }


def measure(rounds: int, scratch: Path) -> dict[str, dict[str, dict[str, float]]]:
    """way → scenario → figure → median over rounds."""
    samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for number in range(rounds):
        for way in WAYS:
            cluster = start(way, scratch / way)
            try:
                asyncio.run(drive(cluster, 16, 4, 1, seed=0))  # first request: lanes and caches are cold before it
                samples[way, "start", "ready_s"].append(cluster.started_s)
                for name, isl, osl in SCENARIOS:
                    for clients in CONCURRENCIES:
                        figures = asyncio.run(drive(cluster, isl, osl, clients, seed=number))
                        for figure, value in figures.items():
                            samples[way, f"{name}, C {clients}", figure].append(value)
            finally:
                stop(cluster)
            print(f"round {number + 1} of {rounds}: {way} done", file=sys.stderr)
    table: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for (way, scenario, figure), values in samples.items():
        table[way][scenario][figure] = statistics.median(values)
    return table


def print_table(table: dict[str, dict[str, dict[str, float]]]) -> None:
    print("| scenario | figure | " + " | ".join(WAYS) + " |")
    print("|---|---|" + "---|" * len(WAYS))
    first = next(iter(table.values()))
    for scenario, figures in first.items():
        for figure in figures:
            values = " | ".join(f"{table[way][scenario][figure]:.1f}" for way in WAYS)
            print(f"| {scenario} | {figure} | {values} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the medians there as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as scratch:
        table = measure(arguments.rounds, Path(scratch))
    print_table(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
