"""Isthmus' front door beside NVIDIA Dynamo's disaggregated one, in turn, with the same client: `make bench-door`.

    python bench/front_door.py [--dynamo .venv-dynamo] [--rounds 7] [--clients 32,256] [--json FILE]

Everything runs on this machine's cores: the client, the front doors, and what stands behind them. Behind Isthmus'
ingress are its real planner, a real nats-server and workers that compute nothing (bench/door/quick_workers.py); behind
Dynamo's front end are its mock engines at a speed-up of a million. Both tokenize, render a chat template and stream one
event a token. All are started first and measured in turn, so that they see the same machine; medians of the rounds are
printed, and of the ratios within each round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from door.model_folder import NAME, make_model_folder
from door.processes import Door, Processes, free_port, isthmus, raise_file_limit, ready

from isthmus_cli.load.connection import clock_s
from isthmus_cli.load.plan import Asking, Shape
from isthmus_cli.load.report import Report, Targets
from isthmus_cli.load.runner import Load
from isthmus_cli.load.target import parse_target

WORDS, TOKENS = 24, 64
WARMUP_S = 1.0
TIMEOUT_S = 60.0
DYNAMO, ONE, TWO = "Dynamo, disaggregated", "Isthmus", "Isthmus, two ingresses"
Figures = dict[str, float]


@asynccontextmanager
async def dynamo(model: Path, logs: Path, python: Path) -> AsyncIterator[Door]:
    """Its front end and two mock engines; discovery by files, everything on loopback."""
    port = free_port()
    local = dict.fromkeys(
        ("DYN_EVENT_PLANE_HOST", "DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_SYSTEM_HOST"), "127.0.0.1"
    )
    environ = {**os.environ, **local, "DYN_FILE_KV": str(logs / "dynamo-kv"), "DYN_LOG": "error", "HF_HUB_OFFLINE": "1"}
    environ.pop("PYTHONPATH", None)
    planes = ["--discovery-backend", "file", "--request-plane", "tcp"]
    mocker = [str(python), "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", NAME]
    mocker += ["--speedup-ratio", "1000000", *planes, "--disaggregation-mode"]
    front_end = [str(python), "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    processes = Processes(logs)
    try:
        engines = [processes.start(f"dynamo-{role}", [*mocker, role], environ) for role in ("prefill", "decode")]
        front = processes.start("dynamo-front", [*front_end, "--router-mode", "round-robin", *planes], environ)
        door = Door(f"http://127.0.0.1:{port}/v1", [front], {"workers": engines})
        await ready(door.url, processes)
        yield door
    finally:
        processes.stop()


async def measure(door: Door, clients: int, seconds: float, seed: int) -> Figures:
    """One level of load on one front door."""
    now_s = clock_s()
    report = Report(Targets(), now_s + WARMUP_S, now_s + WARMUP_S + seconds)
    load = Load(parse_target(door.url), Asking(NAME), report.take, timeout_s=TIMEOUT_S, seed=seed)
    used: list[dict[str, float]] = []

    async def watch() -> None:
        for at_s in (report.from_s, report.until_s):
            await asyncio.sleep(at_s - clock_s())
            usage = resource.getrusage(resource.RUSAGE_SELF)
            used.append({**door.cpu_s(), "client": usage.ru_utime + usage.ru_stime})

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch())
        tasks.create_task(load.closed_loop(clients, WARMUP_S + seconds, Shape(WORDS, TOKENS)))
    told = report.as_json()
    if report.errors or not report.tokens:
        raise SystemExit(f"{door.url}, {clients} clients: {told['errors'] or 'no answer in the time'}")
    tokens = max(1, report.tokens)
    cpu = {f"cpu_{name}_us": (used[1][name] - used[0][name]) / tokens * 1e6 for name in used[0]}
    return {
        "requests_per_s": told["requests_per_s"],
        "tokens_per_request": report.tokens / told["answered"],
        **{
            f"{name}_{share}_ms": told[f"{name}_s"][share] * 1e3 for name in ("ttft", "e2e") for share in ("p50", "p99")
        },
        **cpu,
        "cpu_all_us": sum(cpu.values()),
        "rss_mib": door.rss_bytes() / 2**20,
        "load": os.getloadavg()[0],
    }


Rounds = dict[tuple[str, int], list[Figures]]


async def compare(given: argparse.Namespace, scratch: Path) -> Rounds:
    model = make_model_folder(scratch / "model")
    ways: dict[str, Callable[[Path], Any]] = {
        ONE: partial(isthmus, model),
        TWO: partial(isthmus, model, ingresses=2),
    }
    python = given.dynamo / "bin" / "python"
    if python.exists():
        ways[DYNAMO] = partial(dynamo, model, python=python.absolute())
    else:
        print(f"{python} does not exist: Dynamo is left out (make bench-door installs it)", file=sys.stderr)
    found: Rounds = defaultdict(list)
    async with AsyncExitStack() as stack:
        doors: dict[str, Door] = {}
        for number, (name, start) in enumerate(ways.items()):
            logs = scratch / str(number)
            logs.mkdir()
            doors[name] = await stack.enter_async_context(start(logs))
        await asyncio.sleep(WARMUP_S)
        for number in range(given.rounds):
            for clients in given.clients:
                for name, door in doors.items():
                    figures = await measure(door, clients, given.seconds, number)
                    found[name, clients].append(figures)
                    print(f"round {number + 1}: {name}, {clients} clients: {figures}", file=sys.stderr, flush=True)
    return found


COLUMNS = {
    "requests/s": "requests_per_s",
    "TTFT p50 ms": "ttft_p50_ms",
    "TTFT p99 ms": "ttft_p99_ms",
    "E2E p50 ms": "e2e_p50_ms",
    "E2E p99 ms": "e2e_p99_ms",
    "front CPU µs/token": "cpu_front_us",
    "all CPU µs/token": "cpu_all_us",
    "front RSS MiB": "rss_mib",
}


def table(found: Rounds) -> str:
    rows = [f"| front door | clients | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for (name, clients), rounds in sorted(found.items(), key=lambda item: (item[0][1], item[0][0])):
        cells = [f"{statistics.median(each[key] for each in rounds):.1f}" for key in COLUMNS.values()]
        rows.append(f"| {name} | {clients} | {' | '.join(cells)} |")
    return "\n".join(rows)


def ratios(found: Rounds) -> list[str]:
    """Of each round, to Dynamo's in the same round."""
    lines = []
    for (name, clients), rounds in found.items():
        peer = found.get((DYNAMO, clients))
        if name == DYNAMO or peer is None:
            continue
        told = []
        for what, key in (("requests/s", "requests_per_s"), ("TTFT p99", "ttft_p99_ms")):
            each = sorted(ours[key] / theirs[key] for ours, theirs in zip(rounds, peer, strict=True))
            told.append(f"{what} {statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})")
        lines.append(f"{name} / Dynamo, {clients} clients: " + ", ".join(told))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dynamo", type=Path, default=Path(".venv-dynamo"), help="virtual environment with ai-dynamo")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="measured, for each of them in each round")
    parser.add_argument("--clients", type=lambda text: [int(each) for each in text.split(",")], default=[32, 256])
    parser.add_argument("--json", type=Path, help="write every round there")
    given = parser.parse_args()
    raise_file_limit()
    with tempfile.TemporaryDirectory(prefix="isthmus-door-") as scratch:
        found = uvloop.run(compare(given, Path(scratch)))
    print(table(found))
    print("\n".join(["", *ratios(found)]))
    if given.json is not None:
        rounds = [{"door": name, "clients": clients, "rounds": each} for (name, clients), each in found.items()]
        given.json.write_text(json.dumps(rounds, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
