"""`isthmus status --watch`: the cluster as it is, again and again, through whatever happens to it."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from isthmus_cli import status as status_view
from isthmus_cli.dialling import dial
from isthmus_cli.readiness import cluster_view
from isthmus_cli.state import ClusterState, StateDir
from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.errors import IsthmusError
from isthmus_shared.messages.health import ClusterView

CONNECT_S = 1.0
"""For one try; the next frame tries again."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Frame:
    cluster: ClusterState | None
    """None: looked at through a bus' URL, or gone."""
    view: ClusterView | None
    """The last that came; None before the first."""
    age_s: float
    problem: str | None
    """Why the view is not of now."""


Show = Callable[[Frame], None]


class Source:
    """Makes frames. What is away now may be back with the next one, and even be another cluster by then."""

    def __init__(self, state_dir: StateDir | None, bus_url: str | None) -> None:
        self._state_dir, self._asked_url = state_dir, bus_url
        self._bus: NatsBus | None = None
        self._url = ""
        self._reached = False
        self._view: ClusterView | None = None
        self._heard_s = 0.0

    async def frame(self) -> Frame:
        """Raises what hinders it only until a bus has been reached once: then there is nothing to watch."""
        cluster, problem = None, None
        now_s = asyncio.get_running_loop().time
        try:
            cluster = None if self._state_dir is None else self._state_dir.read()
            bus = await self._connected(self._asked_url or ("" if cluster is None else cluster.bus_url))
            self._view = await cluster_view(bus)
            self._heard_s = now_s()
        except IsthmusError as error:
            if not self._reached:
                raise
            problem = error.text
        return Frame(cluster, self._view, now_s() - self._heard_s, problem)

    async def close(self) -> None:
        if self._bus is not None:
            await self._bus.close()
            self._bus = None

    async def _connected(self, url: str) -> NatsBus:
        if self._bus is not None and (url != self._url or not self._bus.connected):
            await self.close()
        if self._bus is None:
            self._bus = await dial(url, name="isthmus status", timeout_s=CONNECT_S)
            self._url, self._reached = url, True
        return self._bus


async def watch(source: Source, interval_s: float, show: Show) -> None:
    """Until a signal asks for the end; then it returns."""
    loop = asyncio.get_running_loop()
    watching = asyncio.ensure_future(_frames(source, interval_s, show))
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, watching.cancel)
    try:
        await asyncio.wait({watching})
        if not watching.cancelled():
            watching.result()
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
        await source.close()


async def _frames(source: Source, interval_s: float, show: Show) -> None:
    loop = asyncio.get_running_loop()
    while True:
        began_s = loop.time()
        show(await source.frame())
        await asyncio.sleep(max(0.0, began_s + interval_s - loop.time()))


def rendered(frame: Frame) -> RenderableType:
    parts: list[RenderableType] = []
    if frame.problem is not None:
        age = "" if frame.view is None else f"; what is shown is {frame.age_s:.0f} s old"
        parts.append(Text(f"! {frame.problem}{age}", style="bold red"))
    if frame.view is not None:
        parts += status_view.tables(frame.cluster, frame.view)
    return Group(*parts)


def json_line(frame: Frame) -> str:
    fields = status_view.as_fields(frame.cluster, frame.view)
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"at": at, "problem": frame.problem, "age_s": round(frame.age_s, 3), **fields})


def run(source: Source, interval_s: float, console: Console, *, as_json: bool) -> None:
    """Redraws a terminal; writes frame after frame elsewhere. A reader that leaves ends it."""

    def show_line(frame: Frame) -> None:
        if as_json:
            text = json_line(frame) + "\n"
        else:
            with console.capture() as captured:
                console.print(rendered(frame), "")
            text = captured.get()
        sys.stdout.write(text)
        sys.stdout.flush()

    if as_json or not console.is_terminal:
        asyncio.run(watch(source, interval_s, show_line))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        asyncio.run(watch(source, interval_s, lambda frame: live.update(rendered(frame), refresh=True)))
