"""What the relay's core is told (events) and what it wants done (effects). All frozen; durations in, never instants.

A shell (daemon, simulator, test) carries effects out and reports back. Its promises to the core:

* after `ExpectChunk` exactly one of `ChunkLanded` and `SlotQuiet` for that slot use, whatever happens to the lane;
* after `SendChunk` exactly one `ChunkSent` for that slot use;
* after `Dial` exactly one of `LaneUp` and `DialFailed`; after `CloseLane` or a loss exactly one `LaneDown`;
* a lane keeps the order of control messages, and delivers a prefix of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from isthmus_shared.errors import Fault
from isthmus_shared.ids import Generation, Incarnation, TransferId

ClientId = NewType("ClientId", int)
"""One connection of one worker; never reused in a daemon's life."""
LaneId = NewType("LaneId", int)
"""One authenticated connection to one life of a peer; never reused in a daemon's life."""


@dataclass(frozen=True, slots=True, order=True)
class FlowKey:
    transfer_id: TransferId
    generation: Generation


@dataclass(frozen=True, slots=True)
class SlotUse:
    """A slot and which use of it: what names an earlier use is recognised as late."""

    slot: int
    use: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Credit for one chunk: it may be sent into that slot use of the receiver."""

    chunk: int
    into: SlotUse


class Side(StrEnum):
    OUT = "out"
    IN = "in"


# --- events: from clients -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClientUp:
    client: ClientId


@dataclass(frozen=True, slots=True)
class ClientDown:
    """The client's process or connection is gone: it touches no slot any more."""

    client: ClientId


@dataclass(frozen=True, slots=True)
class OpenSink:
    client: ClientId
    key: FlowKey
    total_bytes: int
    manifest: str
    """Digest of the manifest; opaque here, compared with the consumer's."""
    deadline_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class ChunksFilled:
    client: ClientId
    key: FlowKey
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SealSink:
    client: ClientId
    key: FlowKey


@dataclass(frozen=True, slots=True)
class SinkQuiet:
    """The producer writes into that flow's slots no more (it has seen that the flow is over)."""

    client: ClientId
    key: FlowKey


@dataclass(frozen=True, slots=True)
class OpenSource:
    client: ClientId
    key: FlowKey
    source: Incarnation
    address: str
    total_bytes: int
    manifest: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class ReleaseSource:
    """The consumer reads that flow's slots no more: it is done, or it gives up."""

    client: ClientId
    key: FlowKey


@dataclass(frozen=True, slots=True)
class AbortByClient:
    client: ClientId
    key: FlowKey
    fault: Fault


# --- events: from lanes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LaneUp:
    lane: LaneId
    peer: Incarnation


@dataclass(frozen=True, slots=True)
class LaneDown:
    lane: LaneId
    fault: Fault


@dataclass(frozen=True, slots=True)
class DialFailed:
    peer: Incarnation
    fault: Fault


@dataclass(frozen=True, slots=True)
class PullReceived:
    lane: LaneId
    key: FlowKey


@dataclass(frozen=True, slots=True)
class OpenedReceived:
    lane: LaneId
    key: FlowKey
    total_bytes: int
    chunk_bytes: int
    manifest: str


@dataclass(frozen=True, slots=True)
class CreditReceived:
    lane: LaneId
    key: FlowKey
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class DoneReceived:
    lane: LaneId
    key: FlowKey


@dataclass(frozen=True, slots=True)
class AbortReceived:
    lane: LaneId
    key: FlowKey
    fault: Fault


@dataclass(frozen=True, slots=True)
class ChunkLanded:
    """A credited chunk is in its slot; `intact` is the checksum's verdict."""

    lane: LaneId
    key: FlowKey
    chunk: int
    into: SlotUse
    intact: bool


@dataclass(frozen=True, slots=True)
class SlotQuiet:
    """Nothing was or will be received into that revoked slot use any more."""

    into: SlotUse


@dataclass(frozen=True, slots=True)
class ChunkSent:
    """The transport reads that slot no more. Not `ok`: the bytes may not have gone out (the lane is lost)."""

    lane: LaneId
    key: FlowKey
    chunk: int
    out_of: SlotUse
    ok: bool


@dataclass(frozen=True, slots=True)
class Drain:
    """No new sinks from now on; what is open may finish."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    ClientUp
    | ClientDown
    | OpenSink
    | ChunksFilled
    | SealSink
    | SinkQuiet
    | OpenSource
    | ReleaseSource
    | AbortByClient
    | LaneUp
    | LaneDown
    | DialFailed
    | PullReceived
    | OpenedReceived
    | CreditReceived
    | DoneReceived
    | AbortReceived
    | ChunkLanded
    | SlotQuiet
    | ChunkSent
    | Drain
    | Tick
)

# --- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SinkOpened:
    client: ClientId
    key: FlowKey
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
    slots: tuple[int, ...]
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """The flow's one terminal event, to its consumer, unless that has released it."""

    client: ClientId
    key: FlowKey
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


@dataclass(frozen=True, slots=True)
class SendOpened:
    lane: LaneId
    key: FlowKey
    total_bytes: int
    chunk_bytes: int
    manifest: str


@dataclass(frozen=True, slots=True)
class SendCredit:
    lane: LaneId
    key: FlowKey
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class SendDone:
    lane: LaneId
    key: FlowKey


@dataclass(frozen=True, slots=True)
class SendAbort:
    lane: LaneId
    key: FlowKey
    fault: Fault


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
    side: Side
    total_bytes: int
    took_s: float
    fault: Fault | None


Effect = (
    SinkOpened
    | SinkEnded
    | SourceReady
    | SourceFailed
    | CloseClient
    | Dial
    | CloseLane
    | SendPull
    | SendOpened
    | SendCredit
    | SendDone
    | SendAbort
    | SendChunk
    | ExpectChunk
    | RevokeFlow
    | FlowClosed
)
