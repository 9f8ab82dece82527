"""An event loop in virtual time: when nothing is ready, it jumps to the next timer instead of waiting.

The services know no clock but their loop's, so they run unchanged under this one, and an hour of traffic takes
seconds and gives the same order of events on every run. Only for code that waits on timers and futures: a thread or
a socket that would wake the loop later cannot be awaited in virtual time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingLeftToDo(RuntimeError):
    """Every task waits, and no timer is set: a deadlock, which real time would turn into a hang."""


class _JumpingSelector(selectors.SelectSelector):
    """Polls; where it would have waited, it moves `now_s` on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise NothingLeftToDo(f"at {self.now_s:.6f} s every task waits and no timer is set")
        self.now_s += max(timeout, 0.0)
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """`loop.time()` starts at 0 and moves only when nothing else can happen."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_simulated(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time, and return what it returns."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)
