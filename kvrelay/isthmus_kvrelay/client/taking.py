"""A client's first step: a connection to the relay, and the pool's descriptor, which comes with the first byte."""

from __future__ import annotations

import asyncio
import os
import socket

from isthmus_kvrelay import control
from isthmus_kvrelay.framing import PREFIX_BYTES, length_of
from isthmus_shared.errors import DeadlineExceeded, IsthmusError, PartyLost, ProtocolViolation


async def take_pool(socket_path: str, timeout_s: float) -> tuple[socket.socket, int]:
    """A connection, and the pool's descriptor. In a thread: no event loop's transport can take a descriptor."""
    taking = asyncio.create_task(asyncio.to_thread(_take_pool_blocking, socket_path, timeout_s))
    try:
        return await asyncio.shield(taking)
    except asyncio.CancelledError:
        taking.add_done_callback(_give_pool_back)
        raise


def _give_pool_back(taking: asyncio.Task[tuple[socket.socket, int]]) -> None:
    if not taking.cancelled() and taking.exception() is None:
        sock, fd = taking.result()
        sock.close()
        os.close(fd)


def _take_pool_blocking(socket_path: str, timeout_s: float) -> tuple[socket.socket, int]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    kept = False
    try:
        sock.settimeout(timeout_s)
        sock.connect(socket_path)
        data, fds, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if len(fds) != 1 or data != control.FD_BYTE:
            raise _refusal(sock, data)
        sock.setblocking(False)
        kept = True
        return sock, fds[0]
    except TimeoutError as error:
        raise DeadlineExceeded(f"the relay at {socket_path} did not answer within {timeout_s} s") from error
    except OSError as error:
        raise PartyLost(f"no relay answers at {socket_path}", why=str(error)) from error
    finally:
        if not kept:
            sock.close()


def _refusal(sock: socket.socket, first: bytes) -> IsthmusError:
    stream = sock.makefile("rb")
    with stream:
        prefix = first + stream.read(PREFIX_BYTES - len(first))
        if len(prefix) < PREFIX_BYTES:
            return PartyLost("the relay closed the connection")
        message = control.decode_from_relay(stream.read(length_of(prefix, limit=control.MAX_RELAY_FRAME_BYTES)))
    if isinstance(message, control.Refused):
        return message.fault.to_error()
    return ProtocolViolation("the relay gave no pool")
