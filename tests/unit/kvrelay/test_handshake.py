"""Both ends of a lane's connection prove that they know the secret; what one has said is of no use to another."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from isthmus_kvrelay.framing import PREFIX_BYTES
from isthmus_kvrelay.transports.handshake import (
    NONCE_BYTES,
    Identity,
    NotAuthentic,
    dial_in,
    let_in,
    welcome,
)
from isthmus_shared.errors import IsthmusError
from isthmus_shared.ids import Incarnation

SECRET = b"0123456789abcdef"
DIALER, ACCEPTOR = Identity(Incarnation("dialer"), SECRET), Identity(Incarnation("acceptor"), SECRET)
LANE = bytes(NONCE_BYTES)
WAIT_S = 10.0


@contextmanager
def wires(count: int) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    pairs = [socket.socketpair() for _ in range(count)]
    for one, other in pairs:
        one.setblocking(False)
        other.setblocking(False)
    try:
        yield pairs
    finally:
        for one, other in pairs:
            one.close()
            other.close()


async def dial(sock: socket.socket, me: Identity = DIALER) -> None:
    await dial_in(sock, me, wanted=ACCEPTOR.incarnation, lane=LANE, streams=1, stream=0)


async def accept(sock: socket.socket, me: Identity = ACCEPTOR) -> None:
    await let_in(sock, me)
    await welcome(sock)


async def frame(sock: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    head = b""
    while len(head) < PREFIX_BYTES:
        head += await loop.sock_recv(sock, PREFIX_BYTES - len(head))
    body = b""
    while len(body) < int.from_bytes(head, "big"):
        body += await loop.sock_recv(sock, int.from_bytes(head, "big") - len(body))
    return head + body


async def test_ends_with_one_secret_let_each_other_in() -> None:
    with wires(1) as [(one, other)]:
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(dial(one), accept(other))


@pytest.mark.parametrize("who", ["dialer", "acceptor"])
async def test_an_end_without_the_secret_is_refused_by_the_other(who: str) -> None:
    stranger = Identity(Incarnation(who), b"fedcba9876543210")
    with wires(1) as [(one, other)]:
        dialer, acceptor = (stranger, ACCEPTOR) if who == "dialer" else (DIALER, stranger)
        ends = [dial(one, dialer), accept(other, acceptor)]
        tasks = [asyncio.ensure_future(end) for end in ends]
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(NotAuthentic):
                await tasks[0]  # the dialer sees the acceptor's proof first
        tasks[1].cancel()
        await asyncio.wait(tasks)


async def test_what_an_acceptor_says_does_not_open_another_connection_of_its() -> None:
    """A stranger, dialed by nobody, sends an acceptor's own words back to it: the role is part of the proof."""
    with wires(1) as [(stranger, other)]:
        loop = asyncio.get_running_loop()
        listening = asyncio.ensure_future(accept(other))
        with wires(1) as [(dialer, tap)]:
            dialing = asyncio.ensure_future(dial(dialer))
            async with asyncio.timeout(WAIT_S):
                hello = await frame(tap)
                await loop.sock_sendall(stranger, hello)
                answer = await frame(stranger)
                await loop.sock_sendall(stranger, answer)  # instead of a dialer's proof
                with pytest.raises(IsthmusError):
                    await listening
            dialing.cancel()
            await asyncio.wait([dialing])


async def test_a_recorded_handshake_opens_nothing_a_second_time() -> None:
    said: list[bytes] = []
    with wires(3) as [(dialer, near), (far, acceptor), (replay, again)]:
        loop = asyncio.get_running_loop()

        async def relay() -> None:
            """Between the two, and writes down what the dialer says."""
            for source, target in ((near, far), (far, near), (near, far), (far, near)):
                words = await frame(source)
                if source is near:
                    said.append(words)
                await loop.sock_sendall(target, words)

        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(dial(dialer), accept(acceptor), relay())
            assert len(said) == 2
            second = asyncio.ensure_future(accept(again))
            await loop.sock_sendall(replay, said[0])
            await frame(replay)
            await loop.sock_sendall(replay, said[1])
            with pytest.raises(NotAuthentic):
                await second


async def test_a_hello_that_was_changed_on_the_way_is_refused() -> None:
    """As somebody in between would, to have a lane of other streams, or of another life."""
    with wires(2) as [(dialer, near), (far, acceptor)]:
        loop = asyncio.get_running_loop()
        ends = [asyncio.ensure_future(dial(dialer)), asyncio.ensure_future(accept(acceptor))]
        async with asyncio.timeout(WAIT_S):
            hello = await frame(near)
            changed = hello.replace(LANE, b"\1" * NONCE_BYTES)
            assert changed != hello
            await loop.sock_sendall(far, changed)
            await loop.sock_sendall(near, await frame(far))
            with pytest.raises(NotAuthentic):
                await ends[0]
        ends[1].cancel()
        await asyncio.wait(ends)
