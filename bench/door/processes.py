"""Front doors as processes: started, found ready, measured by their CPU and memory, stopped."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from door.model_folder import FIRST_TEXT_TOKEN, NAME, VOCABULARY
from isthmus_shared.bus.server import EmbeddedNats

READY_S = 120.0
STOP_S = 10.0
BENCH = Path(__file__).resolve().parent.parent


@dataclass
class Door:
    """A front door that runs."""

    url: str
    fronts: list[int]
    """Process ids of the front door itself."""
    others: dict[str, list[int]] = field(default_factory=dict)
    """Of what stands behind it, by name."""

    def cpu_s(self) -> dict[str, float]:
        """Used so far, by `front` and the others' names."""
        return {name: sum(map(cpu_s, pids)) for name, pids in (("front", self.fronts), *self.others.items())}

    def rss_bytes(self) -> int:
        return sum(map(rss_bytes, self.fronts))


def cpu_s(pid: int) -> float:
    """Run time of all its threads and children, to the nanosecond."""
    total_ns = 0
    with suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                total_ns += int((task / "schedstat").read_text().split()[0])
                children = (task / "children").read_text().split()
                total_ns += round(sum(map(cpu_s, map(int, children))) * 1e9)
    return total_ns / 1e9


def rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Processes:
    """Everything that a context started; ended with it, by process id."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._all: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self, name: str, command: Sequence[str], environ: Mapping[str, str]) -> int:
        with (self._logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=dict(environ))
        self._all.append((name, process))
        return process.pid

    def check(self) -> None:
        for name, process in self._all:
            if process.poll() is not None:
                tail = (self._logs / f"{name}.log").read_text(errors="replace")[-2000:]
                raise SystemExit(f"{name} ended with {process.returncode}:\n{tail}")

    def stop(self) -> None:
        for _, process in reversed(self._all):
            process.terminate()
        for _, process in reversed(self._all):
            try:
                process.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@asynccontextmanager
async def isthmus(
    model: Path, logs: Path, *, ingresses: int = 1, step_ms: float = 0.0, settings: Mapping[str, str] | None = None
) -> AsyncIterator[Door]:
    """The real ingresses (which share one port when there are more), the real planner, a real nats-server, and quick
    workers behind them."""
    processes = Processes(logs)
    async with EmbeddedNats(log_path=logs / "nats.log") as nats:
        environ = {**os.environ, "NATS_URL": nats.url, "ISTHMUS_LOG_LEVEL": "warning"}
        environ["PYTHONPATH"] = os.pathsep.join([str(BENCH), *(path for path in sys.path if path)])
        port = free_port()
        try:
            python = sys.executable
            planner = processes.start("planner", [python, "-m", "isthmus_planner"], environ)
            command = [python, "-m", "door.quick_workers", "--nats", nats.url, "--model", NAME]
            command += ["--step-ms", str(step_ms), "--tokens", str(FIRST_TEXT_TOKEN), str(VOCABULARY)]
            workers = processes.start("workers", command, environ)
            fronts = []
            for number in range(ingresses):
                own = {"ID": f"door-{number}", "PORT": str(port), "MODEL": str(model)}
                own |= {"SHARE_PORT": "true"} if ingresses > 1 else {}
                named = {f"ISTHMUS_INGRESS_{name}": value for name, value in own.items()}
                named |= settings or {}
                front = processes.start(f"ingress-{number}", [python, "-m", "isthmus_ingress"], {**environ, **named})
                fronts.append(front)
            assert nats.pid is not None
            door = Door(
                f"http://127.0.0.1:{port}/v1",
                fronts,
                {"workers": [workers], "planner": [planner], "nats": [nats.pid]},
            )
            for _ in range(4 * ingresses):  # each of those that share a port
                await ready(door.url, processes)
            yield door
        finally:
            processes.stop()


async def ready(url: str, processes: Processes) -> None:
    """Until a small request is answered."""
    body = {"model": NAME, "messages": [{"role": "user", "content": "kalo"}], "max_tokens": 2}
    async with asyncio.timeout(READY_S):
        while not await asyncio.to_thread(_answers, url, json.dumps(body).encode()):
            processes.check()
            await asyncio.sleep(0.2)


def _answers(url: str, body: bytes) -> bool:
    request = urllib.request.Request(f"{url}/chat/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return b"choices" in answer.read()
    except (OSError, urllib.error.URLError):
        return False
