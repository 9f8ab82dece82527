"""A thread that copies, apart from the engine's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Copier:
    """Runs what it is given, one after the other. Nothing it runs raises.

    At the engine's own priority: with a lower one it could lose its core while it holds the interpreter's lock, and
    then the engine's thread would wait for it (measured: tens of milliseconds a step on a busy machine).
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def stop(self, timeout_s: float) -> None:
        """After what is waiting. Idempotent."""
        self._work.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
