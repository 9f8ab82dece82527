"""Who is measured: each is some processes and one way to move a workload between two of them."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from isthmus_kvrelay.bench.children import Child, Message
from isthmus_kvrelay.bench.workloads import MIB, Workload

RELAY_POOL_BYTES = 640 * MIB
"""Half of it for outgoing transfers: the largest workload and some."""
SETTLE_POLL_S = 0.05
SECRET = "ISTHMUS_RELAY_SECRET"


@dataclass(frozen=True, slots=True)
class Limits:
    """How long one series of transfers is."""

    min_s: float
    min_n: int
    max_n: int


class Contender(Protocol):
    @property
    def children(self) -> Sequence[Child]: ...

    def series(self, workload: Workload, limits: Limits) -> list[float]:
        """Seconds of each transfer, one after another."""
        ...

    def intact(self, workload: Workload) -> bool:
        """Whether that workload's bytes arrive as they were sent; also warms everything up."""
        ...

    def close(self) -> None: ...


def start_relay(
    stack: contextlib.ExitStack, folder: Path, node: str, *options: str, settings: dict[str, str] | None = None
) -> Child:
    """A relay whose socket is `node`.sock in the folder; closed with the stack. `settings`: `ISTHMUS_RELAY_*`."""
    environ = {
        "ISTHMUS_RELAY_NODE_ID": node,
        "ISTHMUS_RELAY_SOCKET": str(folder / f"{node}.sock"),
        SECRET: secrets.token_hex(16),
        "ISTHMUS_RELAY_POOL_BYTES": str(RELAY_POOL_BYTES),
        **(settings or {}),
    }
    return _start(stack, "isthmus_kvrelay.bench.relay_process", *options, environ=environ)


def _start(stack: contextlib.ExitStack, module: str, *args: str, environ: dict[str, str] | None = None) -> Child:
    child = Child(module, *args, environ=environ)
    stack.callback(child.close)
    child.answer()
    return child


class RelayContender:
    """Two relays and a process with a client at each."""

    def __init__(
        self,
        folder: Path,
        *,
        checksums: bool = True,
        copies: bool = False,
        settings: dict[str, str] | None = None,
        core: dict[str, Any] | None = None,
    ) -> None:
        """`settings`: `ISTHMUS_RELAY_*`. `core`: fields of the core's settings, to take single credits away."""
        self._copies = copies
        self.reserve_s: list[float] = []
        """Of every transfer so far: from asking for staging until it was there."""
        self._stack = contextlib.ExitStack()
        secret = secrets.token_hex(16)
        options = ["--core", json.dumps(core or {}), *([] if checksums else ["--no-checksums"])]
        with contextlib.ExitStack() as stack:
            relays = [
                start_relay(stack, folder, node, *options, settings={SECRET: secret} | (settings or {}))
                for node in ("a", "b")
            ]
            self.target_socket = folder / "b.sock"
            ends = ("--producer", str(folder / "a.sock"), "--consumer", str(self.target_socket))
            self._driver = _start(stack, "isthmus_kvrelay.bench.driver_process", *ends)
            self._relays = relays
            self.children: list[Child] = [*relays, self._driver]
            self._stack = stack.pop_all()

    def series(self, workload: Workload, limits: Limits) -> list[float]:
        asked = {"min_s": limits.min_s, "min_n": limits.min_n, "max_n": limits.max_n}
        answer = self._driver.ask(do="series", workload=workload.name, copies=self._copies, **asked)
        self.reserve_s += answer["reserve_s"]
        return [float(took_s) for took_s in answer["took_s"]]

    def prepare(self, flows: int, total_bytes: int) -> list[Message]:
        """Tickets of sealed transfers that wait for a consumer."""
        return list(self._driver.ask(do="prepare", flows=flows, total_bytes=total_bytes)["tickets"])

    def intact(self, workload: Workload) -> bool:
        whole = bool(self._driver.ask(do="fill", workload=workload.name)["intact"])
        while not all(relay.ask()["settled"] for relay in self._relays):  # it has a lane now, and compiles its loops
            time.sleep(SETTLE_POLL_S)
        return whole

    def close(self) -> None:
        self._stack.close()


class PairContender:
    """A source and a target process of one module, which takes ``--peer JSON`` (what the target said) at the source.

    Each answers `digest`; the source answers `series` (see `bench.pair`).
    """

    def __init__(self, module: str, *args: str, environ: dict[str, str] | None = None) -> None:
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            target = Child(module, *args, environ=environ)
            stack.callback(target.close)
            told = json.dumps(target.answer())
            source = Child(module, *args, "--peer", told, environ=environ)
            stack.callback(source.close)
            source.answer()
            self.children: list[Child] = [target, source]
            self._source, self._target = source, target
            self._stack = stack.pop_all()

    def series(self, workload: Workload, limits: Limits) -> list[float]:
        asked = {"min_s": limits.min_s, "min_n": limits.min_n, "max_n": limits.max_n}
        return [float(took_s) for took_s in self._source.ask(do="series", workload=workload.name, **asked)["took_s"]]

    def intact(self, workload: Workload) -> bool:
        self._source.ask(do="series", workload=workload.name, min_s=0, min_n=2, max_n=2)
        sides = (self._source, self._target)
        sent, received = (side.ask(do="digest", workload=workload.name)["digest"] for side in sides)
        return bool(sent == received)

    def close(self) -> None:
        self._stack.close()


def sockets(streams: int, *, unpaced: bool = False) -> PairContender:
    """The yardstick, see `bench.socket_process`. `unpaced`: under the congestion control of lanes on loopback."""
    options = ["--streams", str(streams), *(["--unpaced"] if unpaced else [])]
    return PairContender("isthmus_kvrelay.bench.socket_process", *options)
