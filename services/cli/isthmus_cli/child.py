"""One supervised process: started on a leash, restarted with backoff when it crashes, stopped within a bound."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from isthmus_shared.errors import Unavailable

BACKOFF_MIN_S = 0.25
BACKOFF_MAX_S = 10.0
LIVED_WELL_S = 30.0
"""A process that ran so long starts again with the shortest backoff."""
MAX_QUICK_CRASHES = 8
"""In a row, none of which lived well: about 40 s of trying. It will not start; somebody must look."""
STOP_S = 20.0
"""From SIGTERM to SIGKILL: a worker's drain bound, and some."""
KILL_WAIT_S = 5.0
"""The kernel needs milliseconds; a process in uninterruptible sleep is left to it."""
TAIL_LINES = 12
_LEASH = Path(__file__).with_name("leash.py")


@dataclass(frozen=True, slots=True)
class Command:
    """What to run, as what."""

    name: str
    kind: str
    """nats, planner, relay, worker or ingress."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Whole environment of the child."""
    log: Path


class Child:
    """`run` keeps the command alive until `stop` or cancellation. `changed` is called after every start and end."""

    def __init__(
        self, command: Command, changed: Callable[[Child, str], None], *, backoff_max_s: float = BACKOFF_MAX_S
    ) -> None:
        self.command = command
        self._backoff_max_s = backoff_max_s
        self.restarts = 0
        self.stopping = False
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._quick_crashes = 0
        self._log_start_bytes = 0
        """Where in the log this start's own words begin."""

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    async def run(self) -> None:
        """Raises `Unavailable` when the process crashes again and again at once."""
        loop = asyncio.get_running_loop()
        while not self.stopping:
            began_s = loop.time()
            self._process = await self._start()
            self._changed(self, "started")
            status = await self._process.wait()
            if self.stopping:
                return
            self._changed(self, f"ended ({status_text(status)})")
            if loop.time() - began_s >= LIVED_WELL_S:
                self._quick_crashes = 0
            self._quick_crashes += 1
            if self._quick_crashes > MAX_QUICK_CRASHES or is_config_error(status):
                raise Unavailable(
                    f"{self.command.name} ended with {status_text(status)}",
                    why=tail(self.command.log, start_bytes=self._log_start_bytes),
                    todo=f"see {self.command.log}",
                )
            await asyncio.sleep(min(self._backoff_max_s, BACKOFF_MIN_S * 2 ** (self._quick_crashes - 1)))
            self.restarts += 1

    async def stop(self, grace_s: float = STOP_S) -> bool:
        """SIGTERM, then SIGKILL after `grace_s`. Returns whether it went by itself."""
        self.stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return True
        _signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
                return True
        except TimeoutError:
            self.kill()
        try:
            async with asyncio.timeout(KILL_WAIT_S):
                await process.wait()
        except TimeoutError:
            self._changed(self, "does not die")
        return False

    def kill(self) -> None:
        self.stopping = True
        if self._process is not None and self._process.returncode is None:
            _signal(self._process, signal.SIGKILL)

    async def _start(self) -> asyncio.subprocess.Process:
        self.command.log.parent.mkdir(parents=True, exist_ok=True)
        with self.command.log.open("ab") as log:
            self._log_start_bytes = log.tell()
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                str(_LEASH),
                str(os.getpid()),
                *self.command.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.command.env),
                start_new_session=True,  # Ctrl-C is for the supervisor, which then stops them in order
            )


def is_config_error(status: int) -> bool:
    """What `run_service` exits with for a setting that no restart will mend."""
    return status == EXIT_CONFIG


EXIT_CONFIG = 2


def status_text(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def tail(log: Path, *, start_bytes: int = 0, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, for an error message; nothing of before `start_bytes`, which an earlier run wrote."""
    try:
        with log.open("rb") as file:
            file.seek(start_bytes)
            last = deque(file, maxlen=lines)
            return "\n".join(line.decode("utf-8", errors="replace").rstrip("\n") for line in last)
    except FileNotFoundError:
        return ""


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except ProcessLookupError:
        return
