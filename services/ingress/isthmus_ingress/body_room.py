"""How many bytes of bodies may be held at once by requests that are not admitted yet: read, parsed or tokenized.

Without it, connections times the largest body is what clients could make an ingress hold before any other limit counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from isthmus_ingress.openai.errors import TooManyRequests

DEFAULT_BYTES = 256 * 1024 * 1024

Take = Callable[[int], None]
"""So many bytes more. Raises `TooManyRequests`."""


class BodyRoom:
    def __init__(self, limit_bytes: int = DEFAULT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    @contextmanager
    def share(self) -> Iterator[Take]:
        """Of one request, given back at the end. One that is alone may be larger than the limit."""
        mine_bytes = 0

        def take(size_bytes: int) -> None:
            nonlocal mine_bytes
            others_bytes = self.held_bytes - mine_bytes
            if others_bytes and self.held_bytes + size_bytes > self.limit_bytes:
                raise TooManyRequests(
                    "this ingress is reading as many requests as it may",
                    why=f"{self.held_bytes} of {self.limit_bytes} bytes are held",
                    todo="try again shortly",
                )
            mine_bytes += size_bytes
            self.held_bytes += size_bytes

        try:
            yield take
        finally:
            self.held_bytes -= mine_bytes
