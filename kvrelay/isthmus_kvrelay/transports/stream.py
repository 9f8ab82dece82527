"""One blocking byte stream of a lane, for one sending and one receiving thread: a plain socket, or TLS over one."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

from isthmus_kvrelay.compiled.load import Loading
from isthmus_kvrelay.compiled.trains import Trains
from isthmus_kvrelay.wire import CHECKSUM_BYTES, seeded_checksum

Seeds = Sequence[int] | None
"""Of a train's payloads, in order; None: their checksums are left out of account, and zero on the wire."""


class Stream(Protocol):
    def send(self, parts: Sequence[memoryview]) -> None:
        """All of them, in order. Raises `OSError` when the stream is broken."""
        ...

    def receive(self, views: Sequence[memoryview]) -> bool:
        """Fill all of them, in order. False when the peer has closed. Raises `OSError`."""
        ...

    def send_train(self, head: bytes, payloads: Sequence[memoryview], seeds: Seeds) -> None:
        """The head, the payloads, and the payloads' checksums behind them. Raises `OSError`."""
        ...

    def receive_train(self, views: Sequence[memoryview], seeds: Seeds) -> list[bool] | None:
        """Fill all of them, and say of each whether its checksum was the one that came behind them.

        None when the peer has closed. Raises `OSError`.
        """
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
    def __init__(self, sock: socket.socket, loading: Loading | None = None) -> None:
        """`loading`: where compiled loops come from, which move trains from the moment that they are there."""
        sock.setblocking(True)
        self._sock = sock
        self._loading = loading
        self._sending: Trains | None = None
        self._receiving: Trains | None = None

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

    def send_train(self, head: bytes, payloads: Sequence[memoryview], seeds: Seeds) -> None:
        self._sending = self._sending or self._compiled()
        if self._sending is None:
            send_train(self, head, payloads, seeds)
        else:
            self._sending.send(head, payloads, seeds)

    def receive_train(self, views: Sequence[memoryview], seeds: Seeds) -> list[bool] | None:
        self._receiving = self._receiving or self._compiled()
        if self._receiving is None:
            return receive_train(self, views, seeds)
        return self._receiving.receive(views, seeds)

    def _compiled(self) -> Trains | None:
        if self._loading is None or self._loading.loops is None:
            return None
        return Trains(self._loading.loops, self._sock.fileno())

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


def send_train(stream: Stream, head: bytes, payloads: Sequence[memoryview], seeds: Seeds) -> None:
    """See `Stream.send_train`: in Python, over any stream."""
    sums = [0] * len(payloads) if seeds is None else map(seeded_checksum, payloads, seeds)
    tail = b"".join(each.to_bytes(CHECKSUM_BYTES, "big") for each in sums)
    stream.send([memoryview(head), *payloads, memoryview(tail)])


def receive_train(stream: Stream, views: Sequence[memoryview], seeds: Seeds) -> list[bool] | None:
    """See `Stream.receive_train`."""
    tail = memoryview(bytearray(CHECKSUM_BYTES * len(views)))
    if not stream.receive([*views, tail]):
        return None
    if seeds is None:
        return [True] * len(views)
    said = (int.from_bytes(tail[at : at + CHECKSUM_BYTES], "big") for at in range(0, len(tail), CHECKSUM_BYTES))
    return [seeded_checksum(view, seed) == each for view, seed, each in zip(views, seeds, said, strict=True)]


def _after(views: list[memoryview], done_bytes: int) -> list[memoryview]:
    """What is left of them once that many bytes are through."""
    for at, view in enumerate(views):
        if done_bytes < len(view):
            return [view[done_bytes:], *views[at + 1 :]]
        done_bytes -= len(view)
    return []
