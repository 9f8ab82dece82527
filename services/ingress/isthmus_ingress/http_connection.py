"""One client's connection: requests parsed by httptools, one answered at a time, heads and idleness bounded."""

from __future__ import annotations

import asyncio
import socket
import urllib.parse
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol, cast

import httptools

from isthmus_ingress.http_exchange import WIRE, HttpExchange, Scope
from isthmus_ingress.openai.errors import HeadTooLarge, RequestTimeout, TooManyConnections, error_headers, error_json
from isthmus_shared.errors import InvalidRequest, IsthmusError

MAX_HEAD_BYTES = 64 * 1024
"""Of a request's line and headers; browsers and proxies stay below 16 KiB."""
HEADER_COST_BYTES = 32
"""What a header counts beside its name and value, as in HTTP/2 (RFC 9113, 6.5.2): at most 1,985."""
MAX_PIPELINED = 16
"""Requests that came before the one ahead of them was answered. Clients that do so at all send two or three."""
HIGH_WATER_BYTES = 64 * 1024
"""Of an answer, not yet taken by the client: then its writer waits."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    head_timeout_s: float
    keep_alive_s: float
    write_stall_s: float


class Host(Protocol):
    """What a connection asks of its server."""

    limits: ConnectionLimits
    stopping: bool

    @property
    def date(self) -> bytes: ...

    def serve_one(self, exchange: HttpExchange) -> None: ...

    def full(self) -> bool:
        """Whether it has as many connections as it takes."""
        ...

    def opened(self, connection: Connection) -> None: ...

    def closed(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    def __init__(self, host: Host) -> None:
        self._host, self._loop = host, asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        # A client may send what belongs to nothing after a request that closes; it is not read.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.open = False
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes, self._in_head = 0, False
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False
        self._current: HttpExchange | None = None
        """The request that is being answered."""
        self._coming: HttpExchange | None = None
        """The request whose body is being read."""
        self._pipelined: deque[HttpExchange] = deque()
        self._reading = True
        self._writable: asyncio.Future[None] | None = None
        """While the client is behind."""

    @property
    def date(self) -> bytes:
        """The header."""
        return self._host.date

    # -- of the transport ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._peers = {"server": _address(transport, "sockname"), "client": _address(transport, "peername")}
        if self._host.full():
            self.refuse(TooManyConnections("this server has as many connections as it takes", todo="try again shortly"))
            return
        self.open = True
        self._host.opened(self)
        self._after(self._host.limits.head_timeout_s, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._no_timer()
        self.resume_writing()
        self.open = False
        for exchange in (self._current, *self._pipelined):
            if exchange is not None:
                exchange.gone()
        self._pipelined.clear()
        self._current = self._coming = None  # they hold this connection, as the parser does by its methods
        del self._parser
        self._host.closed(self)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        was_in_head = self._in_head
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._stop_reading()  # what it wants to become is not served: it gets its answer, over HTTP
        except httptools.HttpParserError as error:
            too_large = self._in_head and self._head_bytes > MAX_HEAD_BYTES
            self.refuse(_head_too_large() if too_large else _not_http(error))
            return
        if was_in_head and self._in_head:  # one header that does not end calls nobody
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.refuse(_head_too_large())
        elif self._current is None and not self._in_head:
            self._expect_head()  # blank lines are no request

    def eof_received(self) -> None:
        return None

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    # -- of the parser ------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url, self._headers, self._expects_continue = b"", [], False
        self._in_head, self._head_bytes = True, 0
        if self._current is None:
            self._no_timer()
            self._expect_head()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + HEADER_COST_BYTES)
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._no_timer()
        exchange = HttpExchange(
            self,
            self._scope(),
            stays=self._parser.should_keep_alive() and not self._host.stopping,
            expects_continue=self._expects_continue,
        )
        exchange.scope[WIRE] = exchange
        self._coming = exchange
        if self._current is None:
            self._begin(exchange)
        elif len(self._pipelined) < MAX_PIPELINED:
            self._pipelined.append(exchange)
            self._pause()
        else:
            raise ValueError("too many requests at once")  # ends the parser

    def on_body(self, body: bytes) -> None:
        if self._coming is not None and not self._coming.feed(body):
            self._pause()

    def on_message_complete(self) -> None:
        if self._coming is not None:
            self._coming.end_of_body()
            self._coming = None
            if self._current is None:
                self._after(self._host.limits.keep_alive_s, self._idle)

    def _scope(self) -> Scope:
        url = httptools.parse_url(self._url)
        path = (url.path or b"/").decode("ascii")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self._parser.get_http_version(),
            "method": self._parser.get_method().decode("ascii"),
            "scheme": "http",
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": self._headers,
            **self._peers,
        }

    # -- of exchanges (`http_exchange.Line`) --------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self.open and not self.transport.is_closing():
            self.transport.write(data)

    async def drain(self) -> None:
        if self._writable is None:
            return
        try:
            async with asyncio.timeout(self._host.limits.write_stall_s):
                while self._writable is not None:
                    await asyncio.shield(self._writable)
        except TimeoutError:
            self.abort()

    def abort(self) -> None:
        """Drop the connection at once, with what was not sent."""
        if self.open:
            self.open = False
            self.transport.abort()

    def read_on(self) -> None:
        if not self._reading and not self._pipelined and self.open:
            self._reading = True
            self.transport.resume_reading()

    def answered(self, *, stays: bool) -> None:
        self._current = None
        if not self.open:
            return
        if not stays:
            self.transport.close()
        elif self._pipelined:
            self._begin(self._pipelined.popleft())
        elif self._coming is not None:  # of its body the rest is thrown away, in as much time as a head has
            self._expect_head()
        elif not self._in_head:
            self._after(self._host.limits.keep_alive_s, self._idle)
        self.read_on()

    # -- what the server asks -----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """No further request; those that have come may end."""
        self._stop_reading()
        if self._current is None:
            self.transport.close()

    def refuse(self, error: IsthmusError) -> None:
        """Answer what is no request, and hang up."""
        body, status = error_json(error), HTTPStatus(error.http_status)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
            + "".join(f"{name}: {value}\r\n" for name, value in error_headers(error).items())
            + "\r\n"
        )
        if self._current is None or not self._current.begun:
            self.transport.write(head.encode("ascii") + body)
        self.transport.close()

    def _stop_reading(self) -> None:
        last = self._pipelined[-1] if self._pipelined else self._current
        if last is not None:
            last.refuse_to_stay()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _begin(self, exchange: HttpExchange) -> None:
        self._no_timer()
        self._current = exchange
        self._host.serve_one(exchange)

    def _count_head(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head is too large")  # ends the parser

    def _pause(self) -> None:
        if self._reading and self.open:
            self._reading = False
            self.transport.pause_reading()

    def _expect_head(self) -> None:
        if self._timer is None and not self.transport.is_closing():
            self._after(self._host.limits.head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._timer = None
        if self._in_head:
            why = f"{self._host.limits.head_timeout_s:g} s are allowed"
            self.refuse(RequestTimeout("the request's head did not come in time", why=why))
        else:
            self.transport.close()

    def _idle(self) -> None:
        self._timer = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # it has not even taken its answer
        else:
            self.transport.close()

    def _after(self, delay_s: float, call: Callable[[], Any]) -> None:
        self._no_timer()
        self._timer = self._loop.call_later(delay_s, call)

    def _no_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _address(transport: asyncio.BaseTransport, which: str) -> tuple[str, int] | None:
    address = transport.get_extra_info(which)
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) and len(address) >= 2 else None


def _head_too_large() -> HeadTooLarge:
    return HeadTooLarge("the request's line and headers are too large", why=f"{MAX_HEAD_BYTES} bytes are allowed")


def _not_http(error: Exception) -> InvalidRequest:
    return InvalidRequest("the bytes are not an HTTP request", why=str(error)[:200])
