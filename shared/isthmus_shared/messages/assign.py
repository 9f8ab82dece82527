"""What the leading planner tells a worker to be."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.base import WireMessage
from isthmus_shared.messages.health import Role

Epoch = Annotated[int, Field(ge=0, lt=2**63)]
"""Of a leadership: the lease's revision. It only grows; a party refuses one lower than it has seen."""


class AssignRoles(WireMessage):
    """Answered by an Ack once taken; that it is done is seen in the heartbeat."""

    KIND: ClassVar[str] = "assign_roles"

    epoch: Epoch
    incarnation: Incarnation
    """The life of the worker that is meant."""
    roles: tuple[Role, ...] = Field(min_length=1, max_length=2)
    model: str | None = None
    """To load in place of the present one; None: as it is."""
    move: bool = True
    """Whether sequences of a role that ends are to move elsewhere, where that can be done; else they finish first."""
