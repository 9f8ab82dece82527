"""HTTP on the wire: uvicorn with httptools on the caller's loop, a request's body read within bounds, and errors."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from isthmus_ingress.openai.errors import RequestTimeout, UnsupportedMediaType, error_headers, error_json
from isthmus_shared.errors import Cancelled, ConfigInvalid, InvalidRequest, IsthmusError, PayloadTooLarge

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

ABORT = "isthmus.abort"
"""In a scope's extensions: a function that drops the connection at once, unsent bytes included."""
LINGER_S = 1.0
LINGER_BYTES = 32 * 1024 * 1024
"""After a refusal the rest of a body is thrown away for so long and so much, so that the client reads the answer
instead of a reset connection."""
KEEP_ALIVE_S = 65
"""An idle connection; longer than the 60 s of common load balancers, so that they close first."""
BACKLOG = 2048


class ApiProtocol(HttpToolsProtocol):
    """Small writes leave at once, and an application can drop its connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"call": self.transport.abort}}

    def send_400_response(self, msg: str) -> None:
        body = error_json(InvalidRequest("the bytes are not an HTTP request", why=msg))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


class ApiServer(uvicorn.Server):
    """Serves an ASGI application until told to stop; signals stay with the process' own handlers."""

    def __init__(self, app: Any, *, grace_s: float) -> None:
        config = uvicorn.Config(
            app,
            http=ApiProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, int(grace_s)),
        )
        super().__init__(config)
        self._stopping = asyncio.Event()

    async def main_loop(self) -> None:
        """Renew the date header once a second (every tenth tick of uvicorn's own count), without its polling."""
        tick = 0
        while not await self.on_tick(tick):
            tick += 10
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """No new connections; those in use may end what they are doing."""
        self.should_exit = True
        self._stopping.set()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `ConfigInvalid` when the address can't be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        why = error.strerror or str(error)
        todo = "set ISTHMUS_INGRESS_HOST and ISTHMUS_INGRESS_PORT (0 takes a free port)"
        raise ConfigInvalid(
            f"cannot listen on {host}:{port}", why=why, todo=todo, param="ISTHMUS_INGRESS_PORT"
        ) from error
    return listener


def header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def check_json(scope: Scope) -> None:
    """Refuse a content type that is not JSON; none at all is taken for JSON."""
    given = header(scope, b"content-type")
    kind = (given or "application/json").split(";", 1)[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaType(
            "the body must be JSON",
            why=f"the content type is {kind[:64]!r}",
            todo="send Content-Type: application/json",
        )
    encoding = (header(scope, b"content-encoding") or "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaType("the body must not be compressed", why=f"content-encoding is {encoding[:64]!r}")


async def read_body(scope: Scope, receive: Receive, *, limit_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises `PayloadTooLarge` before more than the limit is held, `RequestTimeout`, or `Cancelled`
    when the client leaves."""
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(int(declared), limit_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Cancelled("the client left while it was sending")
                part = message.get("body", b"")
                size += len(part)
                if size > limit_bytes:
                    raise _too_large(size, limit_bytes)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError as error:
        raise RequestTimeout("the body did not come in time", why=f"{timeout_s:g} s are allowed") from error


def _too_large(size: int, limit_bytes: int) -> PayloadTooLarge:
    why = f"it has {size} bytes or more, and {limit_bytes} are allowed"
    return PayloadTooLarge("the body is too large", why=why, todo="send less, or raise ISTHMUS_INGRESS_MAX_BODY_BYTES")


async def send_json(
    send: Send, status: int, body: bytes, headers: dict[str, str], *, content_type: str = "application/json"
) -> None:
    await send({"type": "http.response.start", "status": status, "headers": _raw(headers, len(body), content_type)})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: IsthmusError, headers: dict[str, str]) -> None:
    await send_json(send, error.http_status, error_json(error), {**headers, **error_headers(error)})


async def send_error_early(send: Send, receive: Receive, error: IsthmusError, headers: dict[str, str]) -> None:
    """An error while the body is still coming: answer, throw away what comes within bounds, and hang up."""
    body = error_json(error)
    told = {**headers, **error_headers(error), "connection": "close"}
    raw = _raw(told, len(body), "application/json")
    await send({"type": "http.response.start", "status": error.http_status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    dropped = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while dropped < LINGER_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    break
                dropped += len(message.get("body", b""))
    await send({"type": "http.response.body", "body": b""})


def _raw(headers: dict[str, str], length: int, content_type: str) -> list[tuple[bytes, bytes]]:
    everything = {**headers, "content-type": content_type, "content-length": str(length)}
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in everything.items()]
