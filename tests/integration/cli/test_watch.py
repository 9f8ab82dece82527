"""`isthmus status --watch` before a terminal and in a pipe, while planner and bus come and go."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from isthmus_cli.shapes import SHAPES
from isthmus_shared.bus.server import EmbeddedNats
from isthmus_shared.config import ServiceConfig
from isthmus_shared.ids import Incarnation, IngressId
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import ClusterView, Foreseen, IngressHeartbeat, ProcessState, ViewRequest
from isthmus_shared.service import ServiceRuntime
from isthmus_testing.local_cluster import environment

WAIT_S = 60.0
LATENCY = Foreseen(requests=3, actual_p50_s=0.25, predicted_p50_s=0.2, error=0.125)
INGRESS = IngressHeartbeat(
    incarnation=Incarnation("i1"),
    state=ProcessState.READY,
    interval_s=0.5,
    ingress_id=IngressId("door-one"),
    events_subject="events.door-one",
    requests_in_flight=2,
    ttft=LATENCY,
)


@asynccontextmanager
async def planner(url: str, *ingresses: IngressHeartbeat) -> AsyncIterator[None]:
    """Answers what a planner is asked by `status`, and nothing else."""
    view = ClusterView(planner=Incarnation("p1"), ingresses=ingresses)

    async def answer(_request: ViewRequest) -> ClusterView:
        return view

    listening = asyncio.Event()
    async with ServiceRuntime("planner", ServiceConfig(nats_url=url)) as runtime, asyncio.TaskGroup() as tasks:
        serving = runtime.serve(subjects.VIEW, ViewRequest, answer, on_error=lambda _: view, listening=listening)
        task = tasks.create_task(serving)
        await listening.wait()
        yield
        task.cancel()


class Watching:
    """The command, with what it wrote so far."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader) -> None:
        self.process, self._reader = process, reader
        self.text = ""

    async def until(self, wanted: str) -> None:
        """Something that it writes from now on."""
        self.text = ""
        async with asyncio.timeout(WAIT_S):
            while wanted not in self.text:
                piece = await self._reader.read(65536)
                assert piece, f"it ended without {wanted!r}: {self.text}"
                self.text += piece.decode(errors="replace")

    async def line(self) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            found: dict[str, Any] = json.loads(await self._reader.readline())
        return found

    async def ended(self) -> int:
        async with asyncio.timeout(WAIT_S):
            return await self.process.wait()


@asynccontextmanager
async def watching(url: str, *more: str, terminal: bool) -> AsyncIterator[tuple[Watching, int]]:
    """And the terminal's own end, to type into."""
    command = [sys.executable, "-m", "isthmus_cli", "status", "--watch", "--interval-s", "0.1", "--bus-url", url, *more]
    if terminal:
        ours, theirs = pty.openpty()
        env = {**environment(), "TERM": "xterm-256color", "COLUMNS": "200", "LINES": "50"}
        # In a session of its own, whose terminal this is: only then does typing ^C send a signal.
        command = [sys.executable, "-c", CONTROLLING, *command]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )
        os.close(theirs)
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(ours), "rb", buffering=0)
        )
    else:
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment())
        assert process.stdout is not None
        ours, transport, reader = -1, None, process.stdout
    try:
        yield Watching(process, reader), ours
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if transport is not None:
            transport.close()
            os.close(ours)


CONTROLLING = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


@pytest.fixture
async def nats() -> AsyncIterator[EmbeddedNats]:
    async with EmbeddedNats() as server:
        yield server


async def test_a_terminal_shows_what_is_and_says_what_is_away_and_ctrl_c_is_no_failure(nats: EmbeddedNats) -> None:
    async with watching(nats.url, terminal=True) as (shown, keyboard):
        await shown.until("! the planner does not answer")
        async with planner(nats.url, INGRESS):
            await shown.until("door-one")
            await shown.until("250 ms")
            assert "200 ms (off 12%)" in shown.text
        await shown.until("what is shown is")
        await shown.until("door-one")  # the last that was known stays
        async with planner(nats.url, INGRESS):
            await shown.until("door-one")
        os.write(keyboard, b"\x03")
        assert await shown.ended() == 0


async def test_a_pipe_gets_a_line_a_frame_through_the_loss_of_planner_and_bus(nats: EmbeddedNats) -> None:
    async with watching(nats.url, "--json", terminal=False) as (shown, _):

        async def until(problem: bool) -> dict[str, Any]:
            async with asyncio.timeout(WAIT_S):
                while (line := await shown.line())["view"] is None or bool(line["problem"]) is not problem:
                    pass
            return line

        async with planner(nats.url, INGRESS):
            line = await until(problem=False)
            assert SHAPES["status --watch"].problems(line) == []
            assert line["view"]["ingresses"][0]["ttft"] == LATENCY.model_dump(mode="json")
        assert (await until(problem=True))["view"]["ingresses"], "the last that was known stays"
        assert nats.pid is not None
        os.kill(nats.pid, signal.SIGKILL)
        while "bus" not in (await until(problem=True))["problem"]:
            pass
        await nats.restart()
        async with planner(nats.url):
            line = await until(problem=False)
            assert line["view"]["ingresses"] == []
        shown.process.send_signal(signal.SIGINT)
        while (await shown.process.stdout.readline()) != b"":  # type: ignore[union-attr]
            pass
        assert await shown.ended() == 0


async def test_a_reader_that_leaves_ends_it_in_peace(nats: EmbeddedNats) -> None:
    async with planner(nats.url, INGRESS), watching(nats.url, "--json", terminal=False) as (shown, _):
        await shown.line()
        shown.process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
        assert await shown.ended() == 0


async def test_a_bus_that_was_never_there_is_a_failure() -> None:
    async with watching("nats://127.0.0.1:1", terminal=False) as (shown, _):
        assert await shown.ended() == 4
