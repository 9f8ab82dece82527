"""A role is a set of handlers that can be attached to a running worker, and taken away again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from isthmus_shared.errors import Fault
from isthmus_shared.messages.base import WireMessage
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.work import Ack, SubmitReply
from isthmus_worker.sessions import Sessions

RequestT = TypeVar("RequestT", bound=WireMessage)


@dataclass(frozen=True, slots=True)
class Serving(Generic[RequestT]):
    """One subject that a role answers."""

    subject: str
    request_type: type[RequestT]
    handler: Callable[[RequestT], Awaitable[WireMessage]]
    on_error: Callable[[Fault], WireMessage]
    """The reply that carries a refusal."""


Served = Serving[Any]


def refuse_submit(fault: Fault) -> SubmitReply:
    return SubmitReply(fault=fault)


def refuse_ack(fault: Fault) -> Ack:
    return Ack(fault=fault)


class RoleHandlers(Protocol):
    @property
    def role(self) -> Role: ...

    def served(self, sessions: Sessions) -> tuple[Served, ...]:
        """What to answer while the role is attached."""
        ...
