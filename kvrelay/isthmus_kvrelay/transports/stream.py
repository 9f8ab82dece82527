"""One blocking byte stream of a lane, for one sending and one receiving thread: a plain socket, or TLS over one."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol


class Stream(Protocol):
    def send(self, parts: Sequence[memoryview]) -> None:
        """All of them, in order. Raises `OSError` when the stream is broken."""
        ...

    def receive(self, views: Sequence[memoryview]) -> bool:
        """Fill all of them, in order. False when the peer has closed. Raises `OSError`."""
        ...

    def more_waits(self) -> bool:
        """Whether bytes have come that were not received yet. Never blocks, never raises."""
        ...

    def shut(self) -> None:
        """Both directions end at once; a thread that blocks returns or raises. From any thread. Idempotent."""
        ...

    def close(self) -> None:
        """After both threads have ended."""
        ...


class PlainStream:
    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock

    def send(self, parts: Sequence[memoryview]) -> None:
        left = list(parts)
        while left:
            left = _after(left, self._sock.sendmsg(left))

    def receive(self, views: Sequence[memoryview]) -> bool:
        left = list(views)
        while left:
            if len(left) == 1:  # cheaper than a list of one
                got = self._sock.recv_into(left[0], 0, socket.MSG_WAITALL)
            else:
                got = self._sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
            if got == 0:
                return False
            left = _after(left, got)
        return True

    def more_waits(self) -> bool:
        try:
            return bool(self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def shut(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was quicker

    def close(self) -> None:
        self._sock.close()


def _after(views: list[memoryview], done_bytes: int) -> list[memoryview]:
    """What is left of them once that many bytes are through."""
    for at, view in enumerate(views):
        if done_bytes < len(view):
            return [view[done_bytes:], *views[at + 1 :]]
        done_bytes -= len(view)
    return []
