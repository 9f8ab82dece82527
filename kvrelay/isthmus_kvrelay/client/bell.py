"""How the two ends of a transfer within one node tell each other that all is filled, without asking their relay first.

Each client has a datagram socket in the abstract namespace, and the relay tells a producer the name of its consumer's
and a token that only the three of them know. A ring is that token and nothing else. It is a hint that comes early: the
relay says the same a little later, so a ring that is lost, or that cannot be sent (another network namespace), costs
some time and nothing else. What it claims is safe to act on, see `core.local`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from isthmus_kvrelay.control import TOKEN_BYTES


class Bell:
    def __init__(self, rung: Callable[[bytes], None]) -> None:
        """`rung` is called on the running loop with what came, which need not be a token."""
        self._rung = rung
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind("")  # the kernel picks an abstract name
        self.name: bytes = self._socket.getsockname()
        self._loop.add_reader(self._socket.fileno(), self._read)

    def ring(self, name: bytes, token: bytes) -> None:
        """Thread-safe; never blocks, never fails."""
        try:
            self._socket.sendto(token, socket.MSG_DONTWAIT, name)
        except OSError:
            pass  # nobody there, or it does not read: the relay tells it

    def _read(self) -> None:
        """One ring: the loop comes back while there are more, and does other things in between."""
        try:
            data = self._socket.recv(TOKEN_BYTES + 1)
        except BlockingIOError:
            return
        self._rung(data)

    def close(self) -> None:
        """Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
