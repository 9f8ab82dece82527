"""Who may join: both ends of every TCP connection prove that they know the shared secret, before anything else.

    dialer → acceptor   DialerHello   nonce, its incarnation, lane, stream
    acceptor → dialer   AcceptorHello nonce, its incarnation, HMAC("acceptor", both hellos)
    dialer → acceptor   DialerProof   HMAC("dialer", both hellos)
    acceptor → dialer   Joined        … or Rejected with a fault

HMAC-SHA256 over the very bytes of both hellos, with the role in front, so that an answer can't be reflected and
nothing in the hellos can be changed on the way. The secret never travels. Runs under the event loop, on plain
non-blocking sockets, which then become streams or go to threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field, TypeAdapter

from isthmus_kvrelay.framing import PREFIX_BYTES, Frame, Name, cut, length_of, pack, prefixed, unpack
from isthmus_shared.errors import Fault, IsthmusError, PartyLost, ProtocolViolation, StaleParty
from isthmus_shared.ids import Incarnation

VERSION = 1
MAX_HELLO_BYTES = 24_576
"""Bound on any handshake frame: read from a stranger. A fault with its bounded texts is the largest (20 KB)."""
NONCE_BYTES = 32
MIN_SECRET_CHARS = 16
MAX_STREAMS = 16

LaneKind = Literal["tcp", "verbs"]
Token = Annotated[bytes, Field(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class DialerHello(Frame):
    kind: Literal["dialer_hello"] = "dialer_hello"
    version: int
    nonce: Token
    incarnation: Name
    wanted: Name
    """The incarnation that the dialer means to reach."""
    lane: Token
    """Names the lane that this connection is part of."""
    streams: Annotated[int, Field(ge=1, le=MAX_STREAMS)]
    """Data streams of the lane."""
    stream: Annotated[int, Field(ge=0, le=MAX_STREAMS)]
    """0: the control stream; 1 … streams: a data stream."""
    transport: LaneKind = "tcp"
    """What carries the lane's chunks; a verbs lane has a control stream only."""


class AcceptorHello(Frame):
    kind: Literal["acceptor_hello"] = "acceptor_hello"
    version: int
    nonce: Token
    incarnation: Name
    proof: Token


class DialerProof(Frame):
    kind: Literal["dialer_proof"] = "dialer_proof"
    proof: Token


class Joined(Frame):
    kind: Literal["joined"] = "joined"


class Rejected(Frame):
    kind: Literal["rejected"] = "rejected"
    fault: Fault


class NotAuthentic(ProtocolViolation):
    """The other end does not know the secret. Not a code of its own on the wire: strangers learn nothing."""


@dataclass(frozen=True, slots=True)
class Identity:
    incarnation: Incarnation
    secret: bytes


M = TypeVar("M", bound=BaseModel)


async def _send(sock: socket.socket, frame: Frame) -> bytes:
    payload = pack(frame)
    await asyncio.get_running_loop().sock_sendall(sock, prefixed(payload))
    return payload


async def _receive(sock: socket.socket, adapter: TypeAdapter[M]) -> tuple[M, bytes]:
    size = length_of(await _exactly(sock, PREFIX_BYTES), limit=MAX_HELLO_BYTES)
    payload = await _exactly(sock, size)
    return unpack(payload, adapter, what="handshake"), payload


async def _exactly(sock: socket.socket, size: int) -> bytes:
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < size:
        part = await loop.sock_recv(sock, size - len(data))
        if not part:
            raise PartyLost("the peer closed the connection during the handshake")
        data += part
    return bytes(data)


def _proof(secret: bytes, role: bytes, dialer: bytes, acceptor: bytes) -> bytes:
    parts = (role, dialer, acceptor)
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(secret, text, hashlib.sha256).digest()


def _acceptor_core(version: int, nonce: bytes, incarnation: str) -> bytes:
    """What of the acceptor's hello is under both proofs: all but its own proof."""
    return pack(AcceptorHello(version=version, nonce=nonce, incarnation=incarnation, proof=bytes(NONCE_BYTES)))


_DIALER_HELLO: TypeAdapter[DialerHello] = TypeAdapter(DialerHello)
_ACCEPTOR_ANSWER: TypeAdapter[AcceptorHello | Rejected] = TypeAdapter(
    Annotated[AcceptorHello | Rejected, Field(discriminator="kind")]
)
_DIALER_PROOF: TypeAdapter[DialerProof] = TypeAdapter(DialerProof)
_VERDICT: TypeAdapter[Joined | Rejected] = TypeAdapter(Annotated[Joined | Rejected, Field(discriminator="kind")])


async def dial_in(
    sock: socket.socket,
    me: Identity,
    *,
    wanted: Incarnation,
    lane: bytes,
    streams: int,
    stream: int,
    transport: LaneKind = "tcp",
) -> None:
    """The dialer's half. Raises `StaleParty` when another life answers, `NotAuthentic` when a stranger does."""
    mine = await _send(
        sock,
        DialerHello(
            version=VERSION,
            nonce=secrets.token_bytes(NONCE_BYTES),
            incarnation=me.incarnation,
            wanted=wanted,
            lane=lane,
            streams=streams,
            stream=stream,
            transport=transport,
        ),
    )
    answer, _ = await _receive(sock, _ACCEPTOR_ANSWER)
    if isinstance(answer, Rejected):
        raise answer.fault.to_error()
    theirs = _acceptor_core(answer.version, answer.nonce, answer.incarnation)
    if not hmac.compare_digest(answer.proof, _proof(me.secret, b"acceptor", mine, theirs)):
        raise NotAuthentic("the relay at that address does not know the secret", todo="check ISTHMUS_RELAY_SECRET")
    if answer.incarnation != wanted:
        raise StaleParty("the relay at that address is another life than the one that was meant")
    await _send(sock, DialerProof(proof=_proof(me.secret, b"dialer", mine, theirs)))
    verdict, _ = await _receive(sock, _VERDICT)
    if isinstance(verdict, Rejected):
        raise verdict.fault.to_error()


async def let_in(sock: socket.socket, me: Identity) -> DialerHello:
    """The acceptor's half up to the dialer's proof; `welcome` or `reject` must follow. Raises `NotAuthentic`."""
    hello, theirs = await _receive(sock, _DIALER_HELLO)
    if hello.version != VERSION:
        raise ProtocolViolation(f"the peer speaks version {hello.version}, this relay {VERSION}")
    nonce = secrets.token_bytes(NONCE_BYTES)
    core = _acceptor_core(VERSION, nonce, me.incarnation)
    proof = _proof(me.secret, b"acceptor", theirs, core)
    await _send(sock, AcceptorHello(version=VERSION, nonce=nonce, incarnation=me.incarnation, proof=proof))
    answer, _ = await _receive(sock, _DIALER_PROOF)
    if not hmac.compare_digest(answer.proof, _proof(me.secret, b"dialer", theirs, core)):
        raise NotAuthentic("the dialing peer does not know the secret")
    return hello


async def welcome(sock: socket.socket) -> None:
    await _send(sock, Joined())


async def reject(sock: socket.socket, error: IsthmusError) -> None:
    await _send(sock, Rejected(fault=cut(error.to_fault())))
