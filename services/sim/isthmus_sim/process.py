"""What the processes of a simulated cluster share, and each of them: it can be paused, and vanish at any moment."""

from __future__ import annotations

import abc
import asyncio
import random
from collections.abc import Awaitable, Callable

from isthmus_shared.config import ServiceConfig
from isthmus_shared.errors import BusDisconnected
from isthmus_shared.ids import Incarnation, RequestId, TransferId
from isthmus_shared.messages.health import ProcessState
from isthmus_shared.service import ServiceRuntime
from isthmus_shared.tracing import NullTracing, Tracing
from isthmus_sim.bus import Broker, SimBus
from isthmus_sim.fabric import Fabric
from isthmus_sim.loop import Life
from isthmus_sim.pipe import Belfry
from isthmus_sim.trace import Trace
from isthmus_sim.weather import Weather

UPTIME_S = 100_000.0
"""What a clock may show at the start."""


class World:
    """What all processes of one simulation share. `skew`: of clocks' rates, at most."""

    def __init__(self, seed: int, trace: Trace, *, skew: float = 0.0) -> None:
        self.rng = random.Random(f"{seed}:world")
        self.trace, self.skew = trace, skew
        self.weather = Weather(random.Random(f"{seed}:weather"))
        self.broker = Broker(self.weather, trace)
        self.fabric = Fabric(random.Random(f"{seed}:fabric"))
        self.belfry = Belfry()
        self.tracing: Tracing = NullTracing()
        """Of every process."""
        self.problems: list[str] = []
        """What broke a rule; empty at the end, or the run has failed."""
        self.events = 0
        """That relays have handled."""
        self.may_fail = 0
        """Faults under way that end a process by its own error, which is then started anew."""
        self.asked: dict[RequestId, int] = {}
        self.transfers: dict[TransferId, int] = {}
        """The ids that an ingress drew, and the seed of the request they stand for (each client's is its own)."""
        self._clocks = random.Random(f"{seed}:clocks")

    def new_life(self, name: str) -> Life:
        rate = 1.0 + self._clocks.uniform(-self.skew, self.skew)
        return Life(name, rate=rate, offset_s=self._clocks.uniform(0, UPTIME_S))


class Process:
    """One life of one process. `kill` makes it vanish."""

    def __init__(self, world: World, name: str, main: Callable[[SimBus, Life], Awaitable[None]]) -> None:
        self.name, self.killed = name, False
        self.life = world.new_life(name)
        self.bus = world.broker.client(name, self.life)
        self._world, self._main = world, main
        self.task = self.life.start(self._run(), name=name)
        self.task.add_done_callback(self._done, context=world.broker.context)

    def kill(self) -> None:
        self.killed = True
        self._world.trace.note(self.name, "killed")
        # First: nothing that its end may still say is heard. What it has said may be under way already, or not.
        self.bus.end(lost=self._world.rng.random() < 0.5)
        self.life.resume()
        self.task.cancel()

    async def _run(self) -> None:
        await self.bus.wait_connected()
        await self._main(self.bus, self.life)
        await self.bus.close()

    def _done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None or (self.killed and _only(error, BusDisconnected)):
            return
        self._world.trace.note(self.name, f"failed: {_said(error)}")
        self.bus.end()
        if not self._world.may_fail:
            self._world.problems.append(f"process {self.name} failed: {_said(error)}")


def _only(error: BaseException, kind: type[Exception]) -> bool:
    return (isinstance(error, BaseExceptionGroup) and error.split(kind)[1] is None) or isinstance(error, kind)


def _said(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_said(each) for each in error.exceptions)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return f"{error!r}{where}"


class Service(abc.ABC):
    """Something that is started, crashes and is started again, under one name."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self.lives, self.world = name, 0, world
        self.process: Process | None = None
        self.runtime: ServiceRuntime[ServiceConfig] | None = None

    def start(self) -> None:
        self.lives += 1
        self.world.trace.note(self.name, "started", life=self.lives)
        self.process = Process(self.world, f"{self.name}.{self.lives}", self._main)

    @property
    def life(self) -> Incarnation:
        return Incarnation(f"{self.name}-life{self.lives}")

    @property
    def ready(self) -> bool:
        return self.runtime is not None and not self.runtime.problems()

    async def crash(self) -> None:
        """Everything of it vanishes at once."""
        process, self.process, self.runtime = self.process, None, None
        assert process is not None, "only what runs can crash"
        process.kill()

    async def drain(self) -> None:
        """Told to stop, as by SIGTERM; returns when it has."""
        process, runtime = self.process, self.runtime
        assert process is not None, "only what runs can stop"
        assert runtime is not None, "only what has started can stop in order"
        runtime.set_state(ProcessState.DRAINING)
        runtime.stopping.set()
        await asyncio.wait({process.task})

    @abc.abstractmethod
    async def _main(self, bus: SimBus, life: Life) -> None: ...
