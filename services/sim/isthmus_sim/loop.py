"""One loop in virtual time for all processes of a world. Each has its own clock, and can be stopped as by SIGSTOP.

Which process a callback belongs to is in its context: tasks and timers inherit it from whoever made them, so the
services need not know. What belongs to none (the world: wires, clients, faults) reads the world's own clock.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from typing_extensions import TypeVarTuple, Unpack

from isthmus_shared.simloop import SimulatedLoop

T = TypeVar("T")
_Ts = TypeVarTuple("_Ts")


class Life:
    """One life of one process. Its clock shows `offset_s + rate · world`: no two agree."""

    def __init__(self, name: str, *, rate: float = 1.0, offset_s: float = 0.0) -> None:
        self.name, self.rate, self.offset_s = name, rate, offset_s
        self.paused = False
        self.context = contextvars.copy_context()
        self.context.run(_life.set, self)
        self.on_resume: Callable[[], None] = _nothing
        """Called in the world when it runs again, before anything of it."""
        self._held: list[asyncio.Handle] = []
        self._loop = world_loop()

    def local_s(self, world_s: float) -> float:
        return self.offset_s + world_s * self.rate

    def world_s(self, local_s: float) -> float:
        """The first instant at which its clock shows that."""
        world_s = (local_s - self.offset_s) / self.rate
        while self.local_s(world_s) < local_s:
            world_s += 1e-9
        return world_s

    def pause(self) -> None:
        """Nothing of it runs from now on; what becomes due waits."""
        self.paused = True

    def resume(self) -> None:
        """All at once, in the order in which it became due."""
        if self.paused:
            self.paused = False
            self.on_resume()
            self._loop.let_run(self._held)
            self._held = []

    def hold(self, handle: asyncio.Handle) -> None:
        self._held.append(handle)

    def start(self, main: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """A task of this process."""
        return self._loop.create_task(main, name=name, context=self.context.copy())


_life: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)


def _nothing() -> None:
    pass


class _LocalTimer(asyncio.TimerHandle):
    """A timer whose owner's clock is not the world's."""

    __slots__ = ("local_s",)
    local_s: float

    def when(self) -> float:
        return self.local_s


class _Ready(deque[asyncio.Handle]):
    """The loop's queue of what may run now: what belongs to a paused process is kept back."""

    def append(self, handle: asyncio.Handle, /) -> None:
        life = handle._context.get(_life)  # type: ignore[attr-defined]
        if life is not None and life.paused:
            life.hold(handle)
        else:
            super().append(handle)


class WorldLoop(SimulatedLoop):
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__()
        self._ready = _Ready()

    @property
    def world_s(self) -> float:
        return self._jumping.now_s

    def time(self) -> float:
        """By the clock of the process that asks."""
        life = _life.get()
        return self._jumping.now_s if life is None else life.local_s(self._jumping.now_s)

    def call_at(
        self, when: float, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """`when` is on the clock of the process that calls; the callback belongs to `context`'s."""
        life = _life.get()
        if life is None:
            return super().call_at(when, callback, *args, context=context)
        timer = _LocalTimer(life.world_s(when), callback, args, self, context)
        timer.local_s = when
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def at_world(
        self, when_s: float, callback: Callable[..., object], *args: Any, context: Context
    ) -> asyncio.TimerHandle:
        """Whoever calls: `when_s` is on the world's clock."""
        return super().call_at(when_s, callback, *args, context=context)

    def let_run(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)


def world_loop() -> WorldLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, WorldLoop), "run it with `run_world`"
    return loop


def current_process() -> str:
    """Whose code is running."""
    life = _life.get()
    return "world" if life is None else life.name


def run_world(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time, and return what it returns."""
    with asyncio.Runner(loop_factory=WorldLoop) as runner:
        return runner.run(main)
