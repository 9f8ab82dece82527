"""How the bus says no: the same words from both adapters."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Mapping
from typing import Any

from isthmus_shared.bus.ending import fail
from isthmus_shared.errors import BusDisconnected, BusForbidden, DeadlineExceeded, NoResponders, PayloadTooLarge


def no_responders(subject: str) -> NoResponders:
    return NoResponders(f"nobody listens on {subject}")


def too_late(subject: str, timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"no answer on {subject} within {timeout_s:g} s")


def fail_late(answer: Future[Any], subject: str, timeout_s: float) -> None:
    """For a timer; unless it has come."""
    fail(answer, too_late(subject, timeout_s))


def headers_size_bytes(headers: Mapping[str, str] | None) -> int:
    """What a header block adds to a message: ``NATS/1.0``, one line a header, an empty line."""
    if not headers:
        return 0
    return 12 + sum(len(key.encode()) + len(value.encode()) + 4 for key, value in headers.items())


def too_large(subject: str, size_bytes: int, limit_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"a message of {size_bytes} bytes on {subject} is too large for the bus",
        why=f"its limit is {limit_bytes} bytes",
        todo="shorten the request, or raise the bus server's max_payload",
    )


def disconnected(*, closed: bool, why: str = "") -> BusDisconnected:
    if closed:
        return BusDisconnected("this bus client is closed")
    return BusDisconnected("the bus is out of reach", why=why, todo="retry once it is back", retry_after_s=1.0)


def forbidden(what: str, subject: str, user: str) -> BusForbidden:
    return BusForbidden(
        f"the bus does not let {user or 'us'} {what} {subject}",
        why="the user's permissions do not name that subject",
        todo="give this process the bus user of its role; `isthmus nats-config` makes them (docs/security.md)",
    )


def no_server(url: str, last_error: Exception | None, timeout_s: float) -> BusDisconnected:
    """Nobody there, or one who does not let us in."""
    why = str(last_error or f"no answer within {timeout_s:g} s")
    if "authorization violation" in why.lower():
        todo = "check the user and password in ISTHMUS_NATS_URL, or ISTHMUS_NATS_NKEY"
        return BusDisconnected(f"the bus at {url} refuses this user", why=why, todo=todo)
    return BusDisconnected(f"no bus at {url}", why=why, todo="start nats-server, or set ISTHMUS_NATS_URL")
