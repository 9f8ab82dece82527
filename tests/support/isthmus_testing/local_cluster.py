"""A whole cluster as a user starts it: `isthmus up` as a process, and what its user can see of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from isthmus_cli.readiness import cluster_view
from isthmus_cli.state import ClusterState, StateDir
from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.errors import DeadlineExceeded, Unavailable
from isthmus_shared.messages import subjects
from isthmus_shared.messages.base import unpack_map
from isthmus_shared.messages.health import ClusterView, ProcessState
from isthmus_shared.messages.route import RoutePlan
from isthmus_testing.waiting import tick

START_S = 120.0
STOP_S = 60.0
SETTLE_S = 50.0
"""For staging, credits and blocks to be zero again, and for a killed process to be ready again: longer than any lease
(the planner's 40 s for a transfer), which is what frees a thing when the message that would have did not arrive."""
ANY_HEARTBEAT = f"{subjects.ROOT}.heartbeat.*"


class LocalCluster:
    """Made by `local_cluster`; every method that waits has a bound and says what it waited for."""

    def __init__(self, process: subprocess.Popen[str], state_dir: Path, lines: Queue[dict[str, Any] | None]) -> None:
        self.process, self.state_dir, self._lines = process, state_dir, lines
        self.events: list[dict[str, Any]] = []
        self.url = ""
        self.bus_url = ""

    def until_event(self, name: str, timeout_s: float) -> dict[str, Any]:
        """The next event of that name from the supervisor's ``--json`` output."""
        try:
            while (event := self._lines.get(timeout=timeout_s)) is not None:
                self.events.append(event)
                if event["event"] == name:
                    return event
        except Empty:
            raise AssertionError(f"no event {name!r} within {timeout_s:g} s; so far: {self.told()}") from None
        raise AssertionError(f"`isthmus up` ended before event {name!r}: {self.told()}")

    def told(self) -> str:
        logs = "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in self.logs())
        return "\n".join(str(event.get("text")) for event in self.events) + "\n" + logs

    def logs(self) -> list[Path]:
        return sorted((self.state_dir / "logs").glob("*.log"))

    def forbidden(self) -> list[str]:
        """What the bus has not let somebody say or hear, by the logs."""
        marks = ("bus.forbidden", "bus_forbidden", "Permissions Violation")
        lines = [line for log in self.logs() for line in log.read_text(errors="replace").splitlines()]
        return [line for line in lines if any(mark in line for mark in marks)]

    @property
    def state(self) -> ClusterState:
        return StateDir(self.state_dir).read()

    def pid(self, name: str) -> int:
        (pid,) = (process.pid for process in self.state.processes if process.name == name)
        assert pid is not None, f"{name} is down"
        return pid

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    def restarts(self, name: str) -> int:
        return next(process.restarts for process in self.state.processes if process.name == name)

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=STOP_S)

    async def until_planned(self) -> None:
        """A planner that is there now has told of a plan, so that an ingress could go on without it."""
        bus = await NatsBus.connect(self.bus_url, name="test")
        async with bus, asyncio.timeout(START_S), bus.subscribe(subjects.PLAN) as plans:
            async for message in plans:
                if RoutePlan.decode(message.data).models:
                    return

    async def until_led(self) -> None:
        """A planner holds the lease."""
        async with asyncio.timeout(START_S):
            while not any(planner.leader for planner in (await self.view()).planners):
                await tick()

    async def view(self) -> ClusterView:
        bus = await NatsBus.connect(self.bus_url, name="test")
        async with bus:
            return await cluster_view(bus)

    async def until_idle(self) -> ClusterView:
        """Until everyone is ready, and staging, credits, flows, sequences and KV blocks are as at the start.

        Only what was told since this call counts: a beat from before the last request would look idle as well. Of two
        beats heard here, the planner knows the first at least.
        """
        expected = {process.name for process in self.state.processes}
        problems: list[str] = []
        heard: Counter[str] = Counter()
        bus = await NatsBus.connect(self.bus_url, name="test")
        try:
            async with bus, asyncio.timeout(SETTLE_S), bus.subscribe(ANY_HEARTBEAT) as beats:
                async for beat in beats:  # each may have changed what the planner knows
                    heard[unpack_map(beat.data, what="heartbeat")["incarnation"]] += 1
                    try:
                        view = await cluster_view(bus)
                    except (Unavailable, DeadlineExceeded) as error:
                        problems = [f"the planner: {error.text}"]
                        continue
                    problems = unsettled(view, expected)
                    beats_of = (*view.workers, *view.relays, *view.ingresses)
                    problems += [f"{b.incarnation} was not heard twice" for b in beats_of if heard[b.incarnation] < 2]
                    if not problems:
                        return view
        except TimeoutError:
            pass
        raise AssertionError(f"after {SETTLE_S:g} s still: {problems}\n{self.told()}")

    async def metrics(self, worker: str) -> dict[str, float]:
        """Samples of one worker's, a node's relay's or the ingress' /metrics, by name and labels."""
        view = await self.view()
        addresses: dict[str, str | None] = {beat.worker_id: beat.http_address for beat in view.workers}
        addresses |= {f"relay-{beat.relay.node_id}": beat.http_address for beat in view.relays}
        addresses |= {beat.ingress_id: beat.http_address for beat in view.ingresses}
        text = await asyncio.to_thread(_get, f"http://{addresses[worker]}/metrics")
        return {
            sample.name + "".join(f"{{{key}={value}}}" for key, value in sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


def unsettled(view: ClusterView, expected: set[str]) -> list[str]:
    """What is not as it was before the first request, in words."""
    found = {beat.worker_id for beat in view.workers} | {f"relay-{beat.relay.node_id}" for beat in view.relays}
    missing = {name for name in expected if name not in ("nats-server", "planner", "ingress")} - found
    problems = [f"{name} is missing" for name in sorted(missing)]
    for worker in view.workers:
        load = worker.load
        facts = {
            "state": worker.state is not ProcessState.READY and worker.state,
            "no relay": worker.relay is None,
            "running": load.running,
            "waiting": load.waiting,
            "loading": load.loading,
            "blocks": load.kv_blocks_total - load.kv_blocks_free,
        }
        problems += [f"{worker.worker_id}: {name} {value}" for name, value in facts.items() if value]
    for relay in view.relays:
        facts = {
            "state": relay.state is not ProcessState.READY and relay.state,
            "staging bytes": relay.pool_bytes - relay.pool_free_bytes,
            "flows out": relay.flows_out,
            "flows in": relay.flows_in,
            "credits": relay.credits_outstanding_bytes,
            "quarantined": relay.slots_quarantined,
        }
        problems += [f"{relay.relay.node_id}: {name} {value}" for name, value in facts.items() if value]
    problems += [f"ingress: in flight {beat.requests_in_flight}" for beat in view.ingresses if beat.requests_in_flight]
    return problems


@contextmanager
def launched(arguments: Sequence[str], state_dir: Path) -> Iterator[LocalCluster]:
    """`isthmus up` with those arguments, not waited for. Whatever of it still runs at the end is killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "isthmus_cli", "up", "--json", "--port", "0", "--state-dir", str(state_dir), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    lines: Queue[dict[str, Any] | None] = Queue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    try:
        yield LocalCluster(process, state_dir, lines)
    finally:
        if process.poll() is None:
            process.kill()  # its children die with it
        process.wait()
        reader.join()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def local_cluster(arguments: Sequence[str], state_dir: Path) -> Iterator[LocalCluster]:
    """A cluster that is ready; stopped in order at the end."""
    with launched(arguments, state_dir) as cluster:
        ready = cluster.until_event("ready", START_S)
        cluster.url, cluster.bus_url = ready["http_url"], cluster.state.bus_url
        yield cluster
        assert cluster.stop() == 0, cluster.told()
        assert not (refused := cluster.forbidden()), (
            f"what a process may not do on the bus, or its role lacks: {refused}"
        )


def environment() -> dict[str, str]:
    """Ours, with the sources that this test runs on, and without what would configure Isthmus otherwise."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ISTHMUS_") and key != "NATS_URL"}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _read(process: subprocess.Popen[str], lines: Queue[dict[str, Any] | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(json.loads(line))
    lines.put(None)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
    return text
