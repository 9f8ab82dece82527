"""A service as the operator meets it: exit status, signals, log, health pages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import isthmus_shared
from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.bus.server import EmbeddedNats
from isthmus_shared.errors import NoResponders

WAIT_S = 30.0
PROGRAM = """
import asyncio, os, sys
from isthmus_shared.config import ServiceConfig
from isthmus_shared.errors import ConfigInvalid, PartyLost
from isthmus_shared.messages.health import ProcessState
from isthmus_shared.runtime import run_from_environ
from isthmus_shared.service import ServiceRuntime

async def main(runtime: ServiceRuntime) -> None:
    match sys.argv[1]:
        case "returns":
            return
        case "bug":
            raise ZeroDivisionError("a bug")
        case "lost":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(lose())
        case "config":
            raise ConfigInvalid("a folder is missing", param="ISTHMUS_X")
        case "waits":
            runtime.set_state(ProcessState.READY)
            await runtime.stopping.wait()
        case "stuck":
            runtime.set_state(ProcessState.READY)
            await asyncio.Event().wait()

async def lose() -> None:
    raise PartyLost("the relay went away")

sys.exit(run_from_environ("probe", ServiceConfig, main, os.environ))
"""


@asynccontextmanager
async def process(what: str, environ: Mapping[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    source = str(Path(isthmus_shared.__file__).parent.parent)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        what,
        env={"PATH": os.environ.get("PATH", ""), "PYTHONPATH": source, **environ},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(WAIT_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def until_ready(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    async for line in process.stderr:
        if json.loads(line).get("state") == "ready":
            return
    raise AssertionError("it ended before it was ready")


async def events(process: asyncio.subprocess.Process) -> list[dict[str, object]]:
    _, text = await process.communicate()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(("what", "status"), [("returns", 0), ("bug", 1), ("lost", 1), ("config", 2)])
async def test_the_exit_status_tells_how_it_ended(nats_server: EmbeddedNats, what: str, status: int) -> None:
    async with process(what, {"NATS_URL": nats_server.url}) as probe:
        log = await events(probe)
        assert probe.returncode == status
    failed = [event for event in log if event["event"] == "service.failed"]
    assert len(failed) == (0 if status == 0 else 1)
    assert all(event["service"] == "probe" and event["incarnation"] for event in log)
    if what == "bug":
        assert "ZeroDivisionError: a bug" in str(failed[0]["exception"])
    if what == "lost":
        assert failed[0]["code"] == "party_lost"


async def test_a_wrong_setting_is_told_on_stderr_before_anything_starts() -> None:
    async with process("returns", {"ISTHMUS_HTTP_PORT": "x", "ISTHMUS_NOPE": "1"}) as probe:
        _, text = await probe.communicate()
        assert probe.returncode == 2
    assert b"ISTHMUS_HTTP_PORT='x'" in text
    assert b"ISTHMUS_NOPE" in text
    assert b"Traceback" not in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_ends_it_cleanly(nats_server: EmbeddedNats, number: signal.Signals) -> None:
    async with process("waits", {"NATS_URL": nats_server.url}) as probe:
        await until_ready(probe)
        probe.send_signal(number)
        log = await events(probe)
        assert probe.returncode == 0
    assert [event.get("state") for event in log if event["event"] == "service.state"] == ["draining"]


async def test_a_signal_ends_it_while_it_still_waits_for_the_bus(nats_server: EmbeddedNats) -> None:
    await nats_server.stop()
    async with process("waits", {"NATS_URL": nats_server.url}) as probe:
        assert probe.stderr is not None
        assert json.loads(await probe.stderr.readline())["event"] == "service.starting"
        probe.send_signal(signal.SIGTERM)
        log = await events(probe)
        assert probe.returncode == 0
    assert [event["event"] for event in log][-1] == "service.ended"


async def test_what_does_not_end_in_time_is_cancelled(nats_server: EmbeddedNats) -> None:
    environ = {"NATS_URL": nats_server.url, "ISTHMUS_SHUTDOWN_GRACE_S": "0.05"}
    async with process("stuck", environ) as probe:
        await until_ready(probe)
        probe.send_signal(signal.SIGTERM)
        log = await events(probe)
        assert probe.returncode == 1
    assert "service.cancelled_at_shutdown" in [event["event"] for event in log]


async def test_a_second_signal_does_not_wait_for_the_grace(nats_server: EmbeddedNats) -> None:
    async with process("stuck", {"NATS_URL": nats_server.url, "ISTHMUS_SHUTDOWN_GRACE_S": "3600"}) as probe:
        await until_ready(probe)
        probe.send_signal(signal.SIGTERM)
        assert probe.stderr is not None
        async for line in probe.stderr:
            if json.loads(line)["event"] == "service.stopping":
                break
        probe.send_signal(signal.SIGTERM)
        await probe.communicate()
        assert probe.returncode == 1


async def test_a_process_is_a_nats_micro_service(nats_server: EmbeddedNats) -> None:
    async with (
        process("waits", {"NATS_URL": nats_server.url}),
        await NatsBus.connect(nats_server.url, name="test") as bus,
    ):
        reply = None
        while reply is None:
            with contextlib.suppress(NoResponders):
                reply = json.loads((await bus.request("$SRV.PING.isthmus-probe", b"", timeout_s=WAIT_S)).data)
        assert (reply["type"], reply["name"]) == ("io.nats.micro.v1.ping_response", "isthmus-probe")
