"""A train through a socket, each payload hashed piece by piece on its way, while a piece is in the cache.

Importing this compiles it, or takes it from numba's cache; `compiled.load` does so once the C functions are registered.
Nothing here touches a Python object, so the interpreter's lock is free for a whole train. Addresses are integers: what
lies there must stay until the call returns. Sockets must block. All arrays are of uint64, one entry for each payload.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any

import numba

from isthmus_kvrelay.compiled.symbols import PREFIX

CLOSED = -1
"""Returned instead of an errno: the peer has closed the stream in good order."""
_EINTR = 4
_MORE = int(socket.MSG_NOSIGNAL | socket.MSG_MORE)
"""All but a train's end: its small parts must not go out as packets of their own."""
_LAST = int(socket.MSG_NOSIGNAL)
_WAIT_ALL = int(socket.MSG_WAITALL)

types: Any = numba.types
_I32, _I64, _U64 = types.int32, types.int64, types.uint64
_NUMBERS = types.Array(_U64, 1, "C")

_send = types.ExternalFunction(PREFIX + "send", _I64(_I32, _U64, _U64, _I32))
_recv = types.ExternalFunction(PREFIX + "recv", _I64(_I32, _U64, _U64, _I32))
_errno = types.ExternalFunction(PREFIX + "errno", types.CPointer(_I32)())
_reset = types.ExternalFunction(PREFIX + "xxh3_reset", _I32(_U64, _U64))
_update = types.ExternalFunction(PREFIX + "xxh3_update", _I32(_U64, _U64, _U64))
_digest = types.ExternalFunction(PREFIX + "xxh3_digest", _U64(_U64))

_NO_CACHE = (RuntimeError, OSError, EOFError, ValueError, LookupError, AttributeError, ImportError, UnpicklingError)
"""There is nowhere to keep what is compiled (neither beside this file nor in the user's cache: `RuntimeError`), no room
there, or what is kept there is damaged, which can raise any of these. It is compiled for this process then."""


def _compile(signature: Any, function: Callable[..., int]) -> Callable[..., int]:
    compiled: Callable[..., int]
    try:
        compiled = numba.njit(signature, nogil=True, cache=True, error_model="numpy")(function)
    except _NO_CACHE:
        compiled = numba.njit(signature, nogil=True, error_model="numpy")(function)
    return compiled


def _send_all(fd: int, start: int, size_bytes: int, flags: int) -> int:
    done = _U64(0)
    while done < size_bytes:
        sent = _send(fd, start + done, size_bytes - done, flags)
        if sent >= 0:
            done += _U64(sent)
        else:
            code = numba.carray(_errno(), 1)[0]
            if code != _EINTR:
                return _I64(code)
    return _I64(0)


def _receive_all(fd: int, start: int, size_bytes: int) -> int:
    done = _U64(0)
    while done < size_bytes:
        got = _recv(fd, start + done, size_bytes - done, _WAIT_ALL)
        if got > 0:
            done += _U64(got)
        elif got == 0:
            return _I64(CLOSED)
        else:
            code = numba.carray(_errno(), 1)[0]
            if code != _EINTR:
                return _I64(code)
    return _I64(0)


_send_part = _compile(_I64(_I32, _U64, _U64, _I32), _send_all)
_receive_part = _compile(_I64(_I32, _U64, _U64), _receive_all)


def _send_train(
    fd: int, head: int, head_bytes: int, starts: Any, sizes: Any, seeds: Any, sums: Any, state: int, piece_bytes: int
) -> int:
    """The head, the payloads, then `sums` from its start: their checksums, each with its most significant byte first.

    `state`: the address of `STATE_BYTES`, or 0: no checksums are computed, `sums` goes out as it is.
    Returns 0 or an errno.
    """
    failed = _send_part(fd, head, head_bytes, _MORE)
    if failed:
        return failed
    for number in range(len(starts)):
        if state:
            _reset(state, seeds[number])
        at, left = starts[number], sizes[number]
        while left:
            now = min(left, piece_bytes)
            if state:
                _update(state, at, now)
            failed = _send_part(fd, at, now, _MORE)
            if failed:
                return failed
            at += now
            left -= now
        if state:
            sums[number] = _swapped(_digest(state))
    return _send_part(fd, sums.ctypes.data, _U64(8 * len(starts)), _LAST)


def _receive_train(
    fd: int, starts: Any, sizes: Any, seeds: Any, found: Any, said: Any, state: int, piece_bytes: int
) -> int:
    """Payloads into their places; `found` gets their checksums, `said` what the peer says that they are.

    `state`: as for sending; with 0 `found` stays as it is. Returns 0, `CLOSED` or an errno.
    """
    for number in range(len(starts)):
        if state:
            _reset(state, seeds[number])
        at, left = starts[number], sizes[number]
        while left:
            now = min(left, piece_bytes)
            failed = _receive_part(fd, at, now)
            if failed:
                return failed
            if state:
                _update(state, at, now)
            at += now
            left -= now
        if state:
            found[number] = _digest(state)
    failed = _receive_part(fd, said.ctypes.data, _U64(8 * len(starts)))
    for number in range(len(starts)):
        said[number] = _swapped(said[number])
    return failed


def _swap(number: int) -> int:
    """The eight bytes of a number in the other order."""
    result = _U64(0)
    for shift in range(0, 64, 8):
        result = (result << _U64(8)) | ((number >> _U64(shift)) & _U64(0xFF))
    return result


_swapped = _compile(_U64(_U64), _swap)
send_train = _compile(_I64(_I32, _U64, _U64, _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS, _U64, _U64), _send_train)
receive_train = _compile(_I64(_I32, _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS, _U64, _U64), _receive_train)
