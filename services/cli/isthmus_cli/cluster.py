"""The supervisor behind `isthmus up`: starts a cluster, keeps it alive, stops it in order."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from isthmus_cli import nats_server
from isthmus_cli.bus_users import CLIENT, OPERATOR, RELAY_SECRET, users_of, write_urls
from isthmus_cli.child import Child, Command
from isthmus_cli.commands import Kind, Surroundings, commands
from isthmus_cli.exits import Exit
from isthmus_cli.model import chosen_model
from isthmus_cli.ports import claim_port
from isthmus_cli.readiness import Watch, watch_until_ready
from isthmus_cli.reporter import Reporter
from isthmus_cli.spec import ClusterSpec
from isthmus_cli.state import ClusterState, ProcessState, StateDir
from isthmus_shared.errors import DeadlineExceeded, IsthmusError
from isthmus_shared.secret_file import write_secret

SECRET_BYTES = 32
STOP_ORDER: tuple[tuple[Kind, ...], ...] = (
    (Kind.INGRESS,),
    (Kind.WORKER,),
    (Kind.RELAY, Kind.PLANNER),
)
"""Who is asked for work goes first, so that the others can finish it; all of one kind at once. The bus goes last."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    state_dir: Path
    nats_url: str | None
    """None: a server of our own."""
    start_timeout_s: float
    environ: dict[str, str]
    command: str = "isthmus"
    """How the user can call this command again."""


class _StopAsked(Exception):
    """Ends the supervisor's task group; not an error."""


class Supervisor:
    def __init__(self, spec: ClusterSpec, options: UpOptions, reporter: Reporter) -> None:
        self._spec, self._options, self._reporter = spec, options, reporter
        self._state_dir = StateDir(options.state_dir)
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._children: list[Child] = []
        self._ready = False
        self._http_url = ""
        self._run_dir = Path()
        self._bus: nats_server.Keeper | None = None

    async def run(self) -> Exit:
        """Until a signal comes or something cannot be kept alive. Raises `ConfigInvalid` before anything is started."""
        spec = self._spec
        port = claim_port(spec.ingress.host, spec.ingress.port)
        with self._signals(), self._state_dir.held() as self._run_dir:
            try:
                model = chosen_model(spec.model.path)
                async with nats_server.bus(
                    self._options.nats_url, self._state_dir.logs / "nats.log", self._changed_bus, users_of(spec)
                ) as bus:
                    self._bus = bus
                    return await self._supervise(self._plan(port, model))
            finally:
                self._reporter.say("stopped", f"stopped; logs are in {self._state_dir.logs}")

    def _plan(self, port: int, model: Path) -> list[Command]:
        host = self._spec.ingress.host
        shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        self._http_url = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
        around = Surroundings(
            environ=self._options.environ,
            model=model,
            logs=self._state_dir.logs,
            run_dir=self._run_dir,
            secrets=self._run_dir / "secrets",
            port=port,
            cpus=os.cpu_count() or 1,
            own_bus=self._options.nats_url is None,
        )
        plan = commands(self._spec, around)
        assert self._bus is not None
        write_urls(around.secrets, {command.name: self._bus.url_of(command.name) for command in plan})
        write_secret(around.secrets / RELAY_SECRET, secrets.token_hex(SECRET_BYTES))
        return plan

    async def _supervise(self, plan: Sequence[Command]) -> Exit:
        assert self._bus is not None
        self._children = [Child(command, self._changed) for command in plan]
        failure: IsthmusError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._bus.keep())
                for child in self._children:
                    tasks.create_task(child.run())
                tasks.create_task(self._announce())
                tasks.create_task(self._wait_for_stop())
        except* _StopAsked:
            pass
        except* IsthmusError as group:
            failure = _first(group)
            self._reporter.say("failed", failure.text, code=failure.code)
        finally:
            killed = await self._stop_all()
        if failure is not None:
            return Exit.NOT_STARTED
        return Exit.KILLED if killed else Exit.OK

    async def _announce(self) -> None:
        """Says what is ready when it is; then how to use it."""
        watch = Watch.of(self._spec)
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                await watch_until_ready(self._url_of(OPERATOR), self._http_url, watch, self._reporter)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the cluster was not ready within {self._options.start_timeout_s:g} s",
                why=watch.missing_text(),
                todo=f"see {self._state_dir.logs}",
            ) from error
        self._ready = True
        self._write()
        name = self._spec.model.name
        body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        curl = f"curl {self._http_url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
        self._reporter.say(
            "ready",
            f"{name} is ready at {self._http_url}/v1; try:\n  {curl}\n  {self._options.command} chat 'Hello'",
            http_url=self._http_url,
            bus_url="" if self._bus is None else self._bus.url,
            model=name,
            pid=os.getpid(),
        )

    def _url_of(self, name: str) -> str:
        return "" if self._bus is None else self._bus.url_of(name)

    async def _wait_for_stop(self) -> None:
        await self._stop.wait()
        self._reporter.say("stopping", "stopping (once more Ctrl-C kills)")
        raise _StopAsked

    async def _stop_all(self) -> bool:
        """Returns whether it was cut short by a second signal."""
        orderly = asyncio.ensure_future(self._stop_in_order())
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({orderly, hurry}, return_when=asyncio.FIRST_COMPLETED)
        killed = not orderly.done()
        if killed:
            for child in self._children:
                child.kill()
        await orderly  # bounded: what was killed is gone, and every stop has its own bound
        hurry.cancel()
        return killed

    async def _stop_in_order(self) -> None:
        for child in self._children:
            child.stopping = True
        for kinds in STOP_ORDER:
            going = [child for child in self._children if child.command.kind in kinds]
            by_itself = await asyncio.gather(*(child.stop() for child in going))
            for child, alone in zip(going, by_itself, strict=True):
                if not alone:
                    self._reporter.say("process.killed", f"{child.command.name} had to be killed")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            (self._hurry if self._stop.is_set() else self._stop).set()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _changed(self, child: Child, what: str) -> None:
        name, kind = child.command.name, child.command.kind
        event = "process.started" if what == "started" else "process.ended"
        again = f", start {child.restarts + 1}" if child.restarts else ""
        text = f"{name} {what}{again} (pid {child.pid})" if child.pid is not None else f"{name} {what}"
        self._write()
        self._reporter.say(event, text, name=name, kind=kind, pid=child.pid, log=str(child.command.log))

    def _changed_bus(self, what: str, pid: int | None) -> None:
        event = "process.started" if what == "started" else "process.ended"
        self._reporter.say(event, f"nats-server {what}", name="nats-server", kind=Kind.NATS.value, pid=pid)
        self._write()

    def _write(self) -> None:
        bus = self._bus
        processes = [] if bus is None or bus.pid is None else [_nats_state(bus)]
        processes += [
            ProcessState(
                name=child.command.name,
                kind=child.command.kind,
                pid=child.pid,
                restarts=child.restarts,
                log=str(child.command.log),
            )
            for child in self._children
        ]
        state = ClusterState(
            supervisor_pid=os.getpid(),
            ready=self._ready,
            model=self._spec.model.name,
            http_url=self._http_url,
            bus_url=self._url_of(OPERATOR),
            client_bus_url=self._url_of(CLIENT),
            run_dir=str(self._run_dir),
            processes=tuple(processes),
        )
        self._state_dir.write(state)


def _nats_state(bus: nats_server.Keeper) -> ProcessState:
    return ProcessState(
        name="nats-server", kind=Kind.NATS.value, pid=bus.pid, restarts=bus.restarts, log=str(bus.log_path)
    )


def _first(group: BaseExceptionGroup[IsthmusError]) -> IsthmusError:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, IsthmusError)
    return found


async def up(spec: ClusterSpec, options: UpOptions, reporter: Reporter) -> Exit:
    return await Supervisor(spec, options, reporter).run()
