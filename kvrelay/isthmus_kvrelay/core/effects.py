"""What the relay's core wants done. All frozen. A shell carries them out in order (see `core.events`)."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_kvrelay.core.names import ClientId, FlowKey, Grant, LaneId, Offer, Side, SlotUse
from isthmus_shared.errors import Fault
from isthmus_shared.ids import Incarnation


@dataclass(frozen=True, slots=True)
class SinkOpened:
    client: ClientId
    key: FlowKey
    slots: tuple[int, ...]
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Attached:
    """Both ends of a flow are here. The consumer is told the slots before they are filled, and holds them from now on;
    the producer may tell it directly that they are."""

    producer: ClientId
    consumer: ClientId
    key: FlowKey
    pull: int
    slots: tuple[int, ...]
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class SinkEnded:
    """The flow's one terminal event, to its producer. No fault: delivered."""

    client: ClientId
    key: FlowKey
    fault: Fault | None


@dataclass(frozen=True, slots=True)
class SourceReady:
    client: ClientId
    key: FlowKey
    pull: int
    slots: tuple[int, ...]
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """The flow's one terminal event, to its consumer, unless that has released it."""

    client: ClientId
    key: FlowKey
    pull: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class CloseClient:
    client: ClientId
    fault: Fault


@dataclass(frozen=True, slots=True)
class Dial:
    peer: Incarnation
    address: str


@dataclass(frozen=True, slots=True)
class CloseLane:
    lane: LaneId
    fault: Fault


@dataclass(frozen=True, slots=True)
class SendPull:
    lane: LaneId
    key: FlowKey
    pull: int
    offer: Offer | None
    """Credit for the first chunks, if the source can use it at once."""


@dataclass(frozen=True, slots=True)
class SendDeclined:
    """The answer to a pull whose credit cannot be used: none of it ever will be. `SendOpened` follows in time."""

    lane: LaneId
    key: FlowKey
    pull: int


@dataclass(frozen=True, slots=True)
class SendOpened:
    lane: LaneId
    key: FlowKey
    pull: int
    total_bytes: int
    chunk_bytes: int
    manifest: str


@dataclass(frozen=True, slots=True)
class SendCredit:
    lane: LaneId
    key: FlowKey
    pull: int
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class SendDone:
    lane: LaneId
    key: FlowKey
    pull: int


@dataclass(frozen=True, slots=True)
class SendAbort:
    lane: LaneId
    key: FlowKey
    pull: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class SendRevoke:
    """The receiver ends a pull for which credit is out: the source sends no more and answers once it is quiet."""

    lane: LaneId
    key: FlowKey
    pull: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class SendQuiet:
    """The answer: no byte of that pull leaves any more."""

    lane: LaneId
    key: FlowKey
    pull: int


@dataclass(frozen=True, slots=True)
class SendFeedback:
    """How a consumer behind this relay fares while the peer sends to it."""

    lane: LaneId
    itl_s: float
    target_s: float


@dataclass(frozen=True, slots=True)
class SendChunk:
    lane: LaneId
    key: FlowKey
    chunk: int
    offset_bytes: int
    size_bytes: int
    out_of: SlotUse
    into: SlotUse


@dataclass(frozen=True, slots=True)
class ExpectChunk:
    """Arm a landing slot; comes before the credit that names it."""

    lane: LaneId
    key: FlowKey
    chunk: int
    offset_bytes: int
    size_bytes: int
    into: SlotUse


@dataclass(frozen=True, slots=True)
class RevokeFlow:
    """Disarm every slot of that flow that has not landed, and report each quiet."""

    lane: LaneId
    key: FlowKey


@dataclass(frozen=True, slots=True)
class FlowClosed:
    """For logs and metrics. No fault: delivered."""

    key: FlowKey
    pull: int
    """Which consumer it was for; 0: none has asked."""
    side: Side
    total_bytes: int
    took_s: float
    fault: Fault | None


Effect = (
    SinkOpened
    | Attached
    | SinkEnded
    | SourceReady
    | SourceFailed
    | CloseClient
    | Dial
    | CloseLane
    | SendPull
    | SendDeclined
    | SendOpened
    | SendCredit
    | SendDone
    | SendAbort
    | SendRevoke
    | SendQuiet
    | SendFeedback
    | SendChunk
    | ExpectChunk
    | RevokeFlow
    | FlowClosed
)
