"""What both kinds of endpoint need of HTTP: headers, a body read within bounds, answers in JSON."""

from __future__ import annotations

import asyncio
import contextlib

from isthmus_ingress.body_room import Take
from isthmus_ingress.http_exchange import Receive, Scope, Send
from isthmus_ingress.openai.errors import (
    BODY,
    RequestTimeout,
    UnsupportedMediaType,
    error_headers,
    error_json,
)
from isthmus_shared.errors import Cancelled, IsthmusError, PayloadTooLarge

LINGER_S = 1.0
LINGER_BYTES = 32 * 1024 * 1024
"""After a refusal the rest of a body is thrown away for so long and so much, so that the client reads the answer
instead of a reset connection."""


def header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


def check_json(scope: Scope) -> None:
    """Refuse a content type that is not JSON; none at all is taken for JSON."""
    given = header(scope, b"content-type")
    kind = (given or "application/json").split(";", 1)[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaType(
            "the body must be JSON",
            why=f"the content type is {kind[:64]!r}",
            todo="send Content-Type: application/json",
            param=BODY,
        )
    encoding = (header(scope, b"content-encoding") or "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaType(
            "the body must not be compressed", why=f"content-encoding is {encoding[:64]!r}", param=BODY
        )


async def read_body(scope: Scope, receive: Receive, take: Take, *, limit_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises `PayloadTooLarge` before more than the limit is held, `TooManyRequests` when all requests
    together hold too much, `RequestTimeout`, or `Cancelled` when the client leaves."""
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
                take(len(part))
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError as error:
        raise RequestTimeout("the body did not come in time", why=f"{timeout_s:g} s are allowed", param=BODY) from error


def _too_large(size: int, limit_bytes: int) -> PayloadTooLarge:
    why = f"it has {size} bytes or more, and {limit_bytes} are allowed"
    return PayloadTooLarge(
        "the body is too large", why=why, todo="send less, or raise ISTHMUS_INGRESS_MAX_BODY_BYTES", param=BODY
    )


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
