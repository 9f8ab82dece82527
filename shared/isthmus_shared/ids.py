"""Identifiers. Each is a NewType, so that mypy refuses one where another is meant."""

from __future__ import annotations

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""One client request (one choice of it, when `n > 1`); made by the ingress."""

TransferId = NewType("TransferId", str)
"""One request's KV on its way; made by the ingress, the same over all attempts at that request."""

Generation = NewType("Generation", int)
"""Which attempt at a transfer (1, 2, ...). A message or chunk of an older generation is refused."""

Incarnation = NewType("Incarnation", str)
"""One life of one process. A restart is a new incarnation, and whatever names the old one is refused."""

WorkerId = NewType("WorkerId", str)
NodeId = NewType("NodeId", str)
IngressId = NewType("IngressId", str)

_TOKEN_BYTES = 9  # 72 bits: no collision among 10^9 live ids to 1 in 10^4

_CHOICE_BYTES = 6
"""48 bits: beside each other stand only the requests of one id of a client's."""


def new_id(prefix: str) -> str:
    """A fresh id such as ``req-k3v…``: the prefix, then 12 URL-safe characters (72 random bits)."""
    return f"{prefix}-{secrets.token_urlsafe(_TOKEN_BYTES)}"


def choice_id(asked_as: str) -> RequestId:
    """A fresh id of one choice of a request: what its client knows it by (and may use again), ``~``, 8 characters."""
    return RequestId(f"{asked_as}~{secrets.token_urlsafe(_CHOICE_BYTES)}")


def asked_as(request: RequestId) -> str:
    """What the client knows that request by."""
    return request.rpartition("~")[0] or request


def new_incarnation() -> Incarnation:
    """A fresh incarnation; made once by each process, when it starts."""
    return Incarnation(secrets.token_hex(_TOKEN_BYTES))
