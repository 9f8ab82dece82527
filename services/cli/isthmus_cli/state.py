"""What a running cluster leaves for `isthmus status`, `chat` and `down`: one lock, one file."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from isthmus_shared.bus.login import shown
from isthmus_shared.errors import ConfigInvalid, Unavailable

DEFAULT_STATE_DIR = Path(".isthmus")
MAX_SOCKET_PATH_BYTES = 100
"""Linux takes 107 for a Unix socket's path; a relay may append to it."""


class ProcessState(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: str
    pid: int | None
    restarts: int
    log: str


class ClusterState(BaseModel):
    """`cluster.json`. Readable by its owner only: the bus' URLs hold passwords."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    supervisor_pid: int
    ready: bool
    model: str
    http_url: str
    bus_url: str
    """To look with: the operator's."""
    client_bus_url: str = ""
    """To ask over the bus with."""
    run_dir: str
    processes: tuple[ProcessState, ...] = ()

    def as_fields(self) -> dict[str, Any]:
        """Fit to be shown: without the passwords."""
        fields = self.model_dump(mode="json")
        return fields | {name: shown(fields[name]) for name in ("bus_url", "client_bus_url")}


class StateDir:
    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.file = self.path / "cluster.json"
        self.logs = self.path / "logs"
        self._lock = self.path / "lock"

    @contextmanager
    def held(self) -> Iterator[Path]:
        """Makes the folder ours for as long as the context lasts; yields a folder for sockets, short enough for them.

        Raises `ConfigInvalid` when a cluster already runs there, or nothing can be written there.
        """
        with self._open_lock() as lock:
            self._take(lock)
            self._clear_remains()
            run_dir = self._make_run_dir()
            try:
                yield run_dir
            finally:
                shutil.rmtree(run_dir, ignore_errors=True)
                self.file.unlink(missing_ok=True)
                self._lock.unlink(missing_ok=True)

    def write(self, state: ClusterState) -> None:
        """Replaces the file in one step, so that no reader sees half of it."""
        partial = self.file.with_suffix(".partial")
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(state.model_dump_json(indent=1))
        partial.replace(self.file)

    def read(self) -> ClusterState:
        """The cluster that runs here, or `Unavailable` when none does."""
        state = self._read_any()
        if state is None or not self._is_held():
            raise Unavailable(
                f"no cluster runs with state folder {self.path}",
                todo="start one with `isthmus up`, or give --state-dir",
            )
        return state

    def _open_lock(self) -> IO[str]:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            return self._lock.open("a")
        except OSError as error:
            raise ConfigInvalid(
                f"the state folder {self.path} cannot be used",
                why=error.strerror or str(error),
                todo="give one that can be written with --state-dir",
            ) from error

    def _take(self, lock: IO[str]) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # One that stopped between our open and our lock has taken the file away: then this lock locks nothing.
            current = os.fstat(lock.fileno()).st_ino == self._lock.stat().st_ino
        except (BlockingIOError, FileNotFoundError):
            current = False
        if not current:
            raise ConfigInvalid(
                f"a cluster already runs with state folder {self.path}",
                todo="stop it with `isthmus down`, or give this one its own --state-dir",
            )

    def _read_any(self) -> ClusterState | None:
        try:
            return ClusterState.model_validate_json(self.file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, ValidationError):
            return None
        except OSError as error:
            raise Unavailable(f"{self.file} cannot be read", why=error.strerror or str(error)) from error

    def _is_held(self) -> bool:
        try:
            with self._lock.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def _clear_remains(self) -> None:
        """A supervisor that was killed could not clean up after itself."""
        remains = self._read_any()
        if remains is not None:
            run_dir = Path(remains.run_dir)
            if run_dir.name.startswith("isthmus-run-"):
                shutil.rmtree(run_dir, ignore_errors=True)
        self.file.unlink(missing_ok=True)

    def _make_run_dir(self) -> Path:
        inside = self.path / "isthmus-run-0123456789/a-node-with-a-long-name.sock"
        parent = self.path if len(os.fsencode(inside)) <= MAX_SOCKET_PATH_BYTES else None
        return Path(tempfile.mkdtemp(prefix="isthmus-run-", dir=parent))
