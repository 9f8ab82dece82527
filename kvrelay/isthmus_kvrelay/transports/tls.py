"""Mutual TLS on the connections of a lane, after they have proved the shared secret and before anything else moves.

Both ends show a certificate of one private authority; every certificate of it is a relay's, whatever its name, since
which relay it is was settled by the handshake before. An end without TLS and one with it never get a lane.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus_kvrelay.transports.stream import Seeds, receive_train, send_train
from isthmus_shared.errors import ConfigInvalid, PartyLost

SERVER_NAME = "isthmus-relay"
"""Sent in the clear by the dialer, looked at by nobody; the ssl module wants one."""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    cert: Path
    key: Path
    ca: Path
    """PEM files; `ca` holds the authorities whose certificates are let in."""


class Tls:
    """Both roles' contexts. Raises `ConfigInvalid` when a file cannot be used."""

    def __init__(self, settings: TlsSettings) -> None:
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, settings)
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, settings)

    def context(self, *, dialed: bool) -> ssl.SSLContext:
        return self._client if dialed else self._server

    async def secure(self, socks: Sequence[socket.socket], *, dialed: bool, timeout_s: float) -> list[TlsStream]:
        """Handshakes on all of them at once; takes them over, and closes all if one fails with `OSError`, or with
        `PartyLost` where this host starts no more threads."""
        context = self.context(dialed=dialed)
        results = await asyncio.gather(
            *(asyncio.to_thread(_wrap, sock, context, dialed, timeout_s) for sock in socks), return_exceptions=True
        )
        streams = [result for result in results if isinstance(result, TlsStream)]
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            for stream in streams:
                stream.close()
            for sock in socks:  # those that no thread took
                sock.close()
            if isinstance(errors[0], RuntimeError):
                raise PartyLost("a lane's handshakes cannot be started", why=str(errors[0])) from errors[0]
            raise errors[0]
        return streams


async def connect(
    protocol: Callable[[], asyncio.Protocol], sock: socket.socket, context: ssl.SSLContext | None, *, dialed: bool
) -> None:
    """The loop's end of a connection, over TLS if there is a context."""
    loop = asyncio.get_running_loop()
    if context is None or dialed:
        name = None if context is None else SERVER_NAME
        await loop.create_connection(protocol, sock=sock, ssl=context, server_hostname=name)
    else:
        await loop.connect_accepted_socket(protocol, sock=sock, ssl=context)


def _context(protocol: ssl._SSLMethod, settings: TlsSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(settings.cert, settings.key)
        context.load_verify_locations(settings.ca)
    except OSError as error:  # ssl.SSLError too
        why = f"{settings.cert}, {settings.key}, {settings.ca}: {error}"
        raise ConfigInvalid("the relay's TLS files cannot be used", why=why, param="tls_cert") from error
    return context


def _wrap(sock: socket.socket, context: ssl.SSLContext, dialed: bool, timeout_s: float) -> TlsStream:
    sock.settimeout(timeout_s)
    name = SERVER_NAME if dialed else None
    return TlsStream(context.wrap_socket(sock, server_side=not dialed, server_hostname=name))


class TlsStream:
    """See `stream.Stream`. The socket does not block: OpenSSL's object is for one thread at a time, so each takes it
    for one call and waits for the socket without it."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            done = 0
            while done < len(part):
                done += self._do(self._sock.send, part[done:])

    def receive(self, views: Sequence[memoryview]) -> bool:
        for view in views:
            done = 0
            while done < len(view):
                got = self._do(self._sock.recv_into, view[done:])
                if got == 0:
                    return False
                done += got
        return True

    def send_train(self, head: bytes, payloads: Sequence[memoryview], seeds: Seeds) -> None:
        send_train(self, head, payloads, seeds)

    def receive_train(self, views: Sequence[memoryview], seeds: Seeds) -> list[bool] | None:
        return receive_train(self, views, seeds)

    def more_waits(self) -> bool:
        with self._lock:
            return self._sock.pending() > 0

    def shut(self) -> None:
        try:
            # Not the SSL socket's own, which would make it a plain one under its threads.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was quicker

    def close(self) -> None:
        self._sock.close()

    def _do(self, call: Callable[[memoryview], int], view: memoryview) -> int:
        while True:
            with self._lock:
                try:
                    return call(view)
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
            poll = select.poll()
            poll.register(self._sock.fileno(), event)
            poll.poll()
