"""The cluster of compose/compose.yaml, started with Docker as its user starts it, and what can be done to it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus_cli.readiness import cluster_view
from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.errors import BusDisconnected, DeadlineExceeded, Unavailable
from isthmus_shared.messages.health import ClusterView
from isthmus_testing.local_cluster import ANY_HEARTBEAT, unsettled

ASKED_FOR = "ISTHMUS_TEST_COMPOSE"
COMPOSE = Path(__file__).parents[3] / "compose"
BUILD_S, UP_S, COMMAND_S = 1500.0, 180.0, 60.0
HEALTHY_S = 30.0
"""From a container's end to a cluster whose every container is healthy and at rest again: what was promised."""
BUS_NET, LANES_NET = "bus", "lanes"
KILL = "import os, sys; os.kill(int(sys.argv[1]), 9)"


def why_not() -> str:
    """Why the tests do not run now; empty when they do."""
    if not os.environ.get(ASKED_FOR):
        return "containers are built and started only when asked for: `make compose-test`"
    if shutil.which("docker") is None:
        return "there is no docker command"
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"`{' '.join(command)}` failed: {done.stderr.strip()[:200]}"
    return ""


@dataclass
class ComposeCluster:
    project: str
    environ: dict[str, str]

    def compose(self, *arguments: str, timeout_s: float = COMMAND_S) -> str:
        command = ["docker", "compose", "--project-name", self.project, *arguments]
        done = subprocess.run(
            command, cwd=COMPOSE, env=self.environ, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    def inspect(self, service: str) -> dict[str, Any]:
        (found,) = json.loads(_docker("inspect", self.container(service)))
        assert isinstance(found, dict)
        return found

    def container(self, service: str) -> str:
        return f"{self.project}-{service}-1"

    def services(self) -> list[str]:
        """Those that keep running."""
        return [name for name in self.compose("config", "--services").split() if name != "setup"]

    @property
    def url(self) -> str:
        return "http://" + self.compose("port", "ingress", "8000").strip()

    @property
    def bus_url(self) -> str:
        """The bus from this machine: its network is closed to the outside, but this is its bridge's own host."""
        url = self.secret("operator", "nats_url")
        address = self.inspect("nats")["NetworkSettings"]["Networks"][f"{self.project}_{BUS_NET}"]["IPAddress"]
        return url.replace("@nats:", f"@{address}:")

    def secret(self, role: str, name: str) -> str:
        """What lies in the volume of one role's secrets."""
        image = self.inspect("planner")["Config"]["Image"]
        mount = ("--volume", f"{self.project}_secrets-{role}:/mnt:ro")
        options = ("--rm", "--network", "none", "--no-healthcheck", *mount)
        return _docker("run", *options, "--entrypoint", "cat", image, f"/mnt/{name}").strip()

    def kill(self, service: str) -> None:
        """SIGKILL to the container's first process, from outside: `docker kill` would count as a wish to stop it."""
        pid = self.inspect(service)["State"]["Pid"]
        image = self.inspect("planner")["Config"]["Image"]
        options = ("--rm", "--network", "none", "--pid", "host", "--user", "0", "--cap-add", "KILL", "--no-healthcheck")
        _docker("run", *options, "--entrypoint", "python", image, "-c", KILL, str(pid))

    def restarts(self, service: str) -> int:
        count: int = self.inspect(service)["RestartCount"]
        return count

    @contextmanager
    def cut_off(self, service: str, network: str = BUS_NET) -> Iterator[None]:
        """The container without that network, for as long as the block runs."""
        name = f"{self.project}_{network}"
        _docker("network", "disconnect", name, self.container(service))
        try:
            yield
        finally:
            _docker("network", "connect", "--alias", service, name, self.container(service))

    def log_lines(self, service: str) -> list[str]:
        """What the service wrote, since it was first started."""
        command = ["docker", "logs", self.container(service)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True)
        return [*done.stdout.splitlines(), *done.stderr.splitlines()]

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "40")

    def unwell(self) -> list[str]:
        states = {service: self.inspect(service)["State"] for service in self.services()}
        return [
            f"{service}: {state['Status']}, {state.get('Health', {}).get('Status')}"
            for service, state in states.items()
            if state["Status"] != "running" or state.get("Health", {}).get("Status") != "healthy"
        ]

    async def view(self) -> ClusterView:
        bus = await NatsBus.connect(self.bus_url, name="test")
        async with bus:
            return await cluster_view(bus)

    async def until_settled(self) -> float:
        """Until every container is healthy and nothing is held for any request. Returns how long that took."""
        loop = asyncio.get_running_loop()
        began_s, problems = loop.time(), ["nothing was heard"]
        try:
            async with asyncio.timeout(2 * HEALTHY_S):
                while problems:
                    problems = await self._unsettled()
        except TimeoutError:
            raise AssertionError(f"after {2 * HEALTHY_S:g} s still: {problems}\n{self.logs()}") from None
        return loop.time() - began_s

    async def _unsettled(self) -> list[str]:
        """What is not as it was at the start, after one more heartbeat."""
        if problems := await asyncio.to_thread(self.unwell):
            return problems
        expected = {s.replace("relay-", "relay-node-") for s in self.services()} - {"nats"}
        try:
            bus = await NatsBus.connect(await asyncio.to_thread(lambda: self.bus_url), name="test")
            async with bus, bus.subscribe(ANY_HEARTBEAT) as beats:
                async for _ in beats:
                    return unsettled(await cluster_view(bus), expected)
        except (Unavailable, DeadlineExceeded, BusDisconnected) as error:
            return [error.text]
        return ["the bus went away"]


@contextmanager
def compose_cluster(project: str) -> Iterator[ComposeCluster]:
    """Built, started and healthy; taken down with its volumes at the end."""
    environ = {**os.environ, "PUBLISH_PORT": "0", "RELAY_MEMORY": "512m"}
    cluster = ComposeCluster(project, environ)
    try:
        cluster.compose("build", timeout_s=BUILD_S)
        cluster.compose("up", "--detach", "--wait", "--pull", "missing", timeout_s=UP_S)
        yield cluster
    finally:
        cluster.compose("down", "--volumes", "--timeout", "30", timeout_s=UP_S)


def _docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr[-2000:]}"
    return done.stdout
