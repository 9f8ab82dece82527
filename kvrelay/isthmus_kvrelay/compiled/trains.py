"""The compiled loops for one direction of a stream, and what they need laid out in memory, once for all trains."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from isthmus_kvrelay.compiled.symbols import STATE_ALIGNMENT, STATE_BYTES
from isthmus_kvrelay.wire import MAX_TRAIN_CHUNKS

PIECE_BYTES = 1 << 20
"""Hashed, then sent; or received, then hashed. Smaller ones stay in faster caches, and lose more by their calls than
they gain (measured from 64 KiB to 4 MiB)."""

_Numbers = NDArray[np.uint64]


class Trains:
    """Not thread-safe: one for each direction of a stream."""

    def __init__(self, loops: ModuleType, fd: int) -> None:
        """`loops`: the module `compiled.loops`. `fd`: a blocking socket's, which stays open as long as this is used."""
        self._loops, self._fd = loops, fd
        self._starts, self._sizes, self._seeds, self._sums, self._said = (_numbers() for _ in range(5))
        room = np.zeros(STATE_BYTES + STATE_ALIGNMENT, dtype=np.uint8)
        self._state_room = room  # keeps the address valid
        self._state = -(-_address(room) // STATE_ALIGNMENT) * STATE_ALIGNMENT

    def send(self, head: bytes, payloads: Sequence[memoryview], seeds: Sequence[int] | None) -> None:
        """See `Stream.send_train`."""
        starts, sizes, keys, sums = self._lay_out(payloads, seeds)
        front = np.frombuffer(head, dtype=np.uint8)
        state = 0 if seeds is None else self._state
        code = self._loops.send_train(
            self._fd, _address(front), len(head), starts, sizes, keys, sums, state, PIECE_BYTES
        )
        if code:
            raise OSError(code, os.strerror(code))

    def receive(self, views: Sequence[memoryview], seeds: Sequence[int] | None) -> list[bool] | None:
        """See `Stream.receive_train`."""
        starts, sizes, keys, found = self._lay_out(views, seeds)
        said = self._said[: len(views)]
        state = 0 if seeds is None else self._state
        code = self._loops.receive_train(self._fd, starts, sizes, keys, found, said, state, PIECE_BYTES)
        if code == self._loops.CLOSED:
            return None
        if code:
            raise OSError(code, os.strerror(code))
        intact: list[bool] = (found == said).tolist()
        return intact if seeds is not None else [True] * len(views)

    def _lay_out(
        self, views: Sequence[memoryview], seeds: Sequence[int] | None
    ) -> tuple[_Numbers, _Numbers, _Numbers, _Numbers]:
        count = len(views)
        starts, sizes, keys, sums = (each[:count] for each in (self._starts, self._sizes, self._seeds, self._sums))
        starts[:] = [_address(np.frombuffer(view, dtype=np.uint8)) for view in views]
        sizes[:] = [len(view) for view in views]
        if seeds is None:
            sums[:] = 0
        else:
            keys[:] = seeds
        return starts, sizes, keys, sums


def _numbers() -> _Numbers:
    return np.zeros(MAX_TRAIN_CHUNKS, dtype=np.uint64)


def _address(array: NDArray[np.uint8]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
