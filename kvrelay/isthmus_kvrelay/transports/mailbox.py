"""Events of a transport's threads on their way to its loop: in order, and as many at once as have come meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from isthmus_kvrelay.core.events import Event
from isthmus_kvrelay.transports.port import Emit


class Mailbox:
    def __init__(self, emit: Emit) -> None:
        """`emit` is called on the loop that `start` is called on."""
        self._emit = emit
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._flush_due = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def post(self, event: Event) -> None:
        """Thread-safe."""
        self.post_all((event,))

    def post_all(self, events: Sequence[Event]) -> None:
        """Thread-safe; nothing comes between them."""
        with self._lock:
            self._events.extend(events)
            if self._flush_due:
                return
            self._flush_due = True
        self._loop.call_soon_threadsafe(self.flush)

    def deliver(self, events: Sequence[Event]) -> None:
        """On the loop, from a callback of its own and so never from within an effect: at once, after what waits."""
        with self._lock:
            self._events.extend(events)
            self._flush_due = True
        self.flush()

    def flush(self) -> None:
        """On the loop; until nothing more has come."""
        while True:
            with self._lock:
                if not self._events:
                    self._flush_due = False
                    return
                events, self._events = self._events, []
            self._emit(*events)
