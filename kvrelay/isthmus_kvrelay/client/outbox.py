"""What a client is about to say: from any thread, in order, sent from the loop; what adds up is merged."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence

from isthmus_kvrelay import control

Write = Callable[[Sequence[control.ClientMessage]], None]


class Outbox:
    """Bounded by what its client has open: per transfer a handful of messages, filled chunks merged into few."""

    def __init__(self, loop: asyncio.AbstractEventLoop, write: Write) -> None:
        """Made on the loop's thread, where `write` is called."""
        self._loop, self._write = loop, write
        self._lock = threading.Lock()
        self._home = threading.get_ident()
        self._messages: deque[control.ClientMessage] = deque()
        self._flush_due = False

    def post(self, message: control.ClientMessage) -> None:
        with self._lock:
            if not self._merged(message):
                self._messages.append(message)
            if self._flush_due:
                return
            self._flush_due = True
        try:
            if threading.get_ident() == self._home:
                self._loop.call_soon(self.flush)
            else:
                self._loop.call_soon_threadsafe(self.flush)
        except RuntimeError:
            pass  # the loop is closed, and the connection with it: the relay has given everything back

    def _merged(self, message: control.ClientMessage) -> bool:
        """Whether it went into the last one: reports replace each other, filled chunks of one transfer add up."""
        last = self._messages[-1] if self._messages else None
        if isinstance(message, control.StepNotice | control.ItlNotice) and type(last) is type(message):
            self._messages[-1] = message
            return True
        if isinstance(message, control.FilledNotice) and isinstance(last, control.FilledNotice):
            chunks = last.chunks + message.chunks
            if last.key == message.key and len(chunks) <= control.MAX_FILLED_BYTES:
                self._messages[-1] = last._replace(chunks=chunks)
                return True
        return False

    def flush(self) -> None:
        with self._lock:
            messages, self._messages, self._flush_due = self._messages, deque(), False
        if messages:
            self._write(messages)
