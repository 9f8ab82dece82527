"""Supervision of real, short-lived processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from isthmus_cli.child import Child, Command
from isthmus_shared.errors import Unavailable
from isthmus_testing import eventually

SLEEPER = "import signal, sys; print('up', flush=True); signal.sigwait({signal.SIGTERM}); sys.exit(0)"
STUBBORN = (
    "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); print('up', flush=True); signal.pause()"
)


def command(tmp_path: Path, code: str, **env: str) -> Command:
    full = {"PATH": os.environ["PATH"], **env}
    return Command("child", "worker", (sys.executable, "-c", code), full, tmp_path / "logs" / "child.log")


class Seen:
    def __init__(self) -> None:
        self.what: list[str] = []
        self.event = asyncio.Event()

    def __call__(self, _child: Child, what: str) -> None:
        self.what.append(what)
        self.event.set()

    async def count(self, number: int) -> None:
        await eventually(lambda: len(self.what) >= number)


async def test_a_crashed_process_is_started_again_until_it_is_told_to_stop(tmp_path: Path) -> None:
    seen = Seen()
    child = Child(command(tmp_path, SLEEPER), seen)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(child.run())
        await seen.count(1)
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await seen.count(3)
        assert seen.what == ["started", "ended (SIGKILL)", "started"]
        assert child.pid not in (None, first)
        assert child.restarts == 1
        assert await child.stop()
        await running
    assert child.pid is None


async def test_one_that_never_lives_is_given_up_with_the_end_of_its_log(tmp_path: Path) -> None:
    child = Child(command(tmp_path, "import sys; print('no such thing'); sys.exit(3)"), Seen(), backoff_max_s=0.01)
    with pytest.raises(Unavailable, match=r"exit code 3.*no such thing"):
        async with asyncio.timeout(30):
            await child.run()
    assert child.restarts > 2


async def test_a_bad_setting_is_not_tried_again(tmp_path: Path) -> None:
    child = Child(command(tmp_path, "import sys; print('X is not a setting'); sys.exit(2)"), Seen())
    with pytest.raises(Unavailable, match="X is not a setting"):
        async with asyncio.timeout(20):
            await child.run()
    assert child.restarts == 0


async def test_one_that_does_not_listen_is_killed_within_the_bound(tmp_path: Path) -> None:
    child = Child(command(tmp_path, STUBBORN), Seen())
    log = child.command.log
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(child.run())
        await eventually(lambda: log.exists() and "up" in log.read_text())
        assert not await child.stop(grace_s=0.05)
    assert child.pid is None


async def test_a_child_dies_with_its_killed_supervisor(tmp_path: Path) -> None:
    """The supervisor is a process of its own that starts a child on the leash and is then killed."""
    code = (
        "import asyncio, sys; from pathlib import Path; from isthmus_cli.child import Child, Command\n"
        f"c = Command('c', 'worker', (sys.executable, '-c', {SLEEPER!r}), {{}}, Path({str(tmp_path / 'c.log')!r}))\n"
        "asyncio.run(Child(c, lambda child, what: print(child.pid, flush=True)).run())"
    )
    supervisor = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert supervisor.stdout is not None
    async with asyncio.timeout(20):
        pid = int(await supervisor.stdout.readline())
        log = tmp_path / "c.log"
        await eventually(lambda: "up" in log.read_text())  # past the leash, in the command itself
        handle = os.pidfd_open(pid)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(handle, ended.set)
        supervisor.kill()
        await supervisor.wait()
        await ended.wait()
    asyncio.get_running_loop().remove_reader(handle)
    os.close(handle)
