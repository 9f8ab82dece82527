"""A thread that copies, apart from the engine's."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

NICE = 10
"""Beside a busy engine the copier gets about a tenth of a core, and all of an idle one."""


class Copier:
    """Runs what it is given, one after the other. Nothing it runs raises."""

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
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (work := self._work.get()) is not None:
            work()
