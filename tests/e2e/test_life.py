"""`isthmus up` as its user meets it: how it refuses, and that it leaves nothing running."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus_cli.shapes import SHAPES
from isthmus_testing.engines import prompt_of
from isthmus_testing.local_cluster import START_S, STOP_S, LocalCluster, environment, launched
from isthmus_testing.openai_client import Case, client, stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Handles:
    """Of every process of a cluster, so that a test sees each of them end, whoever its parent is by then."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._open = {p.name: os.pidfd_open(p.pid) for p in cluster.state.processes if p.pid is not None}
        assert len(self._open) == 7, "nats-server, planner, two relays, two workers, ingress"

    def still_running(self, timeout_s: float) -> list[str]:
        running = []
        for name, handle in self._open.items():
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if not poll.poll(timeout_s * 1000):
                running.append(name)
            os.close(handle)
        return running


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "isthmus_cli", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=STOP_S,
        check=False,
    )


def test_a_cluster_can_be_seen_talked_to_and_stopped_and_leaves_only_logs(tiny_model: Path, tmp_path: Path) -> None:
    with launched(["--model", str(tiny_model), "--engine", "sim"], tmp_path) as cluster:
        cluster.until_event("ready", START_S)
        handles = Handles(cluster)

        shown = command("status", "--state-dir", str(tmp_path))
        assert shown.returncode == 0, shown.stderr
        assert all(name in shown.stdout for name in ("prefill-a", "decode-b", "node-a", "node-b"))
        said = command("chat", "Hello", "--max-tokens", "5", "--state-dir", str(tmp_path))
        assert (said.returncode, said.stderr) == (0, "")
        assert said.stdout.strip("\n")

        for name in ("status", "doctor", "chat"):
            words = ["Hello", "--max-tokens", "5"] if name == "chat" else []
            told = command(name, *words, "--json", "--state-dir", str(tmp_path))
            assert told.returncode in (0, 1), "a machine may have its faults, as doctor sees it"
            objects = json.loads(told.stdout)
            for each in objects if isinstance(objects, list) else [objects]:
                assert SHAPES[name].problems(each) == []
            if name == "chat":
                assert (objects["finish_reason"], objects["usage"]["completion_tokens"]) == ("length", 5)
            if name == "doctor":
                assert sum(each["check"] == "pair" and each["grade"] == "ok" for each in objects) == 4

        second = command("up", "--port", "0", "--state-dir", str(tmp_path))
        assert second.returncode == 2
        assert "already runs" in second.stderr
        assert "isthmus down" in second.stderr

        stopped = command("down", "--json", "--state-dir", str(tmp_path))
        assert stopped.returncode == 0, stopped.stderr
        assert SHAPES["down"].problems(json.loads(stopped.stdout)) == []
        assert [problem for event in cluster.events for problem in SHAPES["up"].problems(event)] == []
        assert cluster.process.wait(timeout=STOP_S) == 0
        assert handles.still_running(timeout_s=0) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]
    assert command("status", "--state-dir", str(tmp_path)).returncode == 4


def test_ctrl_c_stops_everything_and_a_killed_supervisor_takes_everything_with_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    for number, code in ((signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)):
        with launched(["--model", str(tiny_model), "--engine", "sim"], tmp_path) as cluster:
            cluster.until_event("ready", START_S)
            handles = Handles(cluster)
            assert cluster.stop(number) == code, cluster.told()
            assert handles.still_running(timeout_s=10) == []


def test_ctrl_c_while_starting_stops_everything_too(tiny_model: Path, tmp_path: Path) -> None:
    with launched(["--model", str(tiny_model), "--engine", "sim"], tmp_path) as cluster:
        while cluster.until_event("process.started", START_S)["name"] != "ingress":
            pass
        handles = Handles(cluster)
        assert cluster.stop(signal.SIGINT) == 0, cluster.told()
        assert handles.still_running(timeout_s=0) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]


def test_a_taken_port_and_a_bad_file_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        refused = command("up", "--port", str(port), "--state-dir", str(tmp_path / "state"))
        assert refused.returncode == 2
        assert f"port {port} on 127.0.0.1 is taken" in refused.stderr
    file = tmp_path / "bad.yaml"
    file.write_text("nodes:\n  - id: a\n    workers:\n      - {id: w, rôle: decode}\n", encoding="utf-8")
    refused = command("up", str(file), "--state-dir", str(tmp_path / "state"))
    assert refused.returncode == 2
    assert f"{file}:4: nodes.0.workers.0" in refused.stderr
    assert not (tmp_path / "state").exists()


def test_a_worker_that_cannot_start_ends_the_cluster_with_its_own_words(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "nodes:\n  - id: a\n    workers:\n      - {id: w, role: decode, env: {ISTHMUS_WORKER_DRAIN_S: soon}}\n",
        encoding="utf-8",
    )
    with launched([str(file), "--model", str(tiny_model)], tmp_path / "state") as cluster:
        failed = cluster.until_event("failed", START_S)
        assert "w ended with exit code 2" in failed["text"]
        assert "ISTHMUS_WORKER_DRAIN_S='soon'" in failed["text"]
        assert cluster.process.wait(timeout=STOP_S) == 3


async def test_ctrl_c_lets_running_streams_end(tiny_model: Path, tmp_path: Path) -> None:
    case = Case(prompt_of(30), max_tokens=100)
    with launched(["--model", str(tiny_model), "--engine", "sim"], tmp_path) as cluster:
        url = cluster.until_event("ready", START_S)["http_url"]
        begun = asyncio.Event()

        async def on_tokens() -> None:
            begun.set()

        async with client(url) as http, asyncio.TaskGroup() as tasks:
            running = tasks.create_task(stream(http, case, on_tokens))
            await begun.wait()
            cluster.process.send_signal(signal.SIGINT)
        assert (running.result().error, len(running.result().token_ids)) == (None, 100)
        assert await asyncio.to_thread(cluster.process.wait, STOP_S) == 0
