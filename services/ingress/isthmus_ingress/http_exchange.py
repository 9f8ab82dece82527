"""One request on a connection and its answer: an ASGI application's `receive` and `send`, and, for those that write
much and often, the same without dictionaries and awaits in between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any, Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

WIRE = "isthmus.wire"
"""In a scope: its `HttpExchange`."""
MAX_UNREAD_BODY_BYTES = 64 * 1024
"""Of a body, not yet taken by the application: then the socket is read no further."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus if status >= 200
}


class Line(Protocol):
    """What an exchange asks of its connection."""

    @property
    def date(self) -> bytes: ...

    @property
    def open(self) -> bool: ...

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...

    def abort(self) -> None: ...

    def read_on(self) -> None: ...

    def answered(self, *, stays: bool) -> None: ...


class HttpExchange:
    __slots__ = (
        "_begun",
        "_bodiless",
        "_body",
        "_body_told",
        "_chunked",
        "_expects_continue",
        "_left_bytes",
        "_line",
        "_stays",
        "_waiter",
        "body_complete",
        "complete",
        "on_gone",
        "scope",
    )

    def __init__(self, line: Line, scope: Scope, *, stays: bool, expects_continue: bool) -> None:
        self.scope = scope
        self.body_complete = self.complete = False
        self.on_gone: Callable[[], None] | None = None
        """Called once when the client goes while its answer is not complete."""
        self._line, self._stays, self._expects_continue = line, stays, expects_continue
        self._body = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._begun = self._chunked = self._body_told = False
        self._bodiless = scope["method"] == "HEAD"
        self._left_bytes: int | None = None
        """Of a body whose length was told."""

    # -- what the connection says ------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> bool:
        """A part of the body. False: no more for now."""
        if self.complete:
            return True  # nobody wants it any more
        self._body += data
        self._wake()
        return len(self._body) <= MAX_UNREAD_BODY_BYTES

    def end_of_body(self) -> None:
        self.body_complete = True
        self._wake()

    def gone(self) -> None:
        self._wake()
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None and not self.complete:
            on_gone()

    def refuse_to_stay(self) -> None:
        """The connection ends with this answer."""
        self._stays = False

    @property
    def begun(self) -> bool:
        return self._begun

    @property
    def connected(self) -> bool:
        return self._line.open

    # -- what the application does ------------------------------------------------------------------------------------

    def take_body(self) -> bytes | None:
        """All of it, if it has come; else None, and `receive` gives it part by part."""
        if not self.body_complete or self._expects_continue:
            return None
        data = bytes(self._body)
        self._body.clear()
        self._body_told = True
        return data

    def start(self, status: int, headers: Headers) -> None:
        """The head. Without a content-length the body is sent in chunks."""
        assert not self._begun, "an answer has one head"
        self._begun = True
        self._bodiless = self._bodiless or status in (204, 304)
        parts = [_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, self._line.date]
        length: int | None = None
        closes = not self._stays
        for name, value in headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"connection" and value.lower() == b"close":
                closes, self._stays = True, False
                continue
            parts += (name, b": ", value, b"\r\n")
        if length is None and not self._bodiless:
            if self.scope["http_version"] == "1.0":
                closes, self._stays = True, False  # the body ends where the connection does
            else:
                self._chunked = True
                parts.append(b"transfer-encoding: chunked\r\n")
        self._left_bytes = length
        if closes:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        self._line.write(b"".join(parts))

    def write(self, data: bytes) -> None:
        """A part of the body; never waits, so that `drain` has to follow wherever much is written."""
        if not data or self._bodiless:
            return
        if self._chunked:
            self._line.write(b"%x\r\n%b\r\n" % (len(data), data))
            return
        if self._left_bytes is not None:
            self._left_bytes -= len(data)
            assert self._left_bytes >= 0, "more body than its content-length"
        self._line.write(data)

    def finish(self) -> None:
        """The end of the body."""
        if self.complete:
            return
        self.complete = True
        self.on_gone = None
        if self._chunked:
            self._line.write(b"0\r\n\r\n")
        short = bool(self._left_bytes) and not self._bodiless
        self._body.clear()
        self._wake()
        self._line.answered(stays=self._stays and not short)

    async def drain(self) -> None:
        """Until the client has taken so much that more may be written. One that takes nothing is cut off in time."""
        await self._line.drain()

    def abort(self) -> None:
        self._line.abort()

    # -- ASGI ---------------------------------------------------------------------------------------------------------

    async def receive(self) -> Message:
        if self._expects_continue and self._line.open:
            self._expects_continue = False
            if not self._begun:
                self._line.write(_CONTINUE)
        while not self._over and (self._body_told or not (self._body or self.body_complete)):
            await self._wait()
        if self._over:
            return {"type": "http.disconnect"}
        data = bytes(self._body)
        self._body.clear()
        self._body_told = self.body_complete
        self._line.read_on()
        return {"type": "http.request", "body": data, "more_body": not self.body_complete}

    async def send(self, message: Message) -> None:
        if self._over:
            return
        if message["type"] == "http.response.start":
            self.start(message["status"], message.get("headers", ()))
            return
        self.write(message.get("body", b""))
        if not message.get("more_body", False):
            self.finish()
        await self.drain()

    @property
    def _over(self) -> bool:
        return self.complete or not self._line.open

    async def _wait(self) -> None:
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
