"""What verbs lanes say on their control stream beside the messages of every lane (`wire.LaneMessage`)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter, model_validator

from isthmus_kvrelay.framing import Count, Frame
from isthmus_kvrelay.transports.verbs.binding import QpAddress
from isthmus_kvrelay.wire import HEADER_BYTES, ColdMessage
from isthmus_shared.errors import Fault

MAX_RAILS = 8
"""Of a lane: as many adapters as any node of this kind has."""

RailIndex = Annotated[int, Field(ge=0, lt=MAX_RAILS)]
Bits24 = Annotated[int, Field(ge=0, lt=2**24)]
Bits32 = Annotated[int, Field(ge=0, lt=2**32)]
Address = Annotated[int, Field(ge=0, lt=2**64)]


class _OfRail(Frame):
    rail: RailIndex
    attempt: Bits32
    """Counted by the dialer; what names an earlier attempt is late."""


class _Endpoint(_OfRail):
    number: Bits24
    psn: Bits24
    gid: Annotated[bytes, Field(min_length=16, max_length=16)]
    lid: Annotated[int, Field(ge=0, lt=2**16)]
    mtu: Annotated[int, Field(ge=1, le=5)]
    pool_address: Address
    pool_rkey: Bits32
    heads_address: Address
    """Of the header area: one header per slot of the pool, and one more that probes write."""
    heads_rkey: Bits32
    slots: Annotated[int, Field(gt=0, lt=2**32)]
    slot_bytes: Annotated[int, Field(gt=0, lt=2**32)]
    receives: Annotated[int, Field(gt=0, lt=2**16)]
    """Posted already."""
    device: Annotated[str, Field(min_length=1, max_length=64)]
    """For logs and errors."""

    @model_validator(mode="after")
    def _memory_ends(self) -> Self:
        heads_bytes = (self.slots + 1) * HEADER_BYTES
        if max(self.pool_address + self.slots * self.slot_bytes, self.heads_address + heads_bytes) > 2**64:
            raise ValueError("memory beyond the end of the address space")
        return self

    @property
    def address(self) -> QpAddress:
        return QpAddress(self.number, self.psn, self.gid, self.lid, self.mtu)


class RailOffer(_Endpoint):
    """Dialer → acceptor: a queue pair of mine; connect one of yours to it."""

    kind: Literal["rail_offer"] = "rail_offer"


class RailAnswer(_Endpoint):
    """Acceptor → dialer: connected; here is mine."""

    kind: Literal["rail_answer"] = "rail_answer"


class RailRefused(_OfRail):
    """Acceptor → dialer: not that rail, not now."""

    kind: Literal["rail_refused"] = "rail_refused"
    fault: Fault


class RailUp(_OfRail):
    """Dialer → acceptor: connected, and my probe has crossed; yours may go."""

    kind: Literal["rail_up"] = "rail_up"


class RailDown(_OfRail):
    """Either way, once: my queue pair is destroyed, and so many chunks had landed through it."""

    kind: Literal["rail_down"] = "rail_down"
    landed: Count
    why: Annotated[str, Field(max_length=1_000)]


class Receives(_OfRail):
    """Either way: so many receives were ever posted."""

    kind: Literal["receives"] = "receives"
    posted: Count


VerbsMessage = RailOffer | RailAnswer | RailRefused | RailUp | RailDown | Receives
AnyMessage = ColdMessage | VerbsMessage
ADAPTER: TypeAdapter[AnyMessage] = TypeAdapter(Annotated[AnyMessage, Field(discriminator="kind")])
