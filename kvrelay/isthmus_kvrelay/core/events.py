"""What the relay's core is told (events) and what it wants done (effects). All frozen; durations in, never instants.

A shell (daemon, simulator, test) carries effects out and reports back. Its promises to the core:

* after `ExpectChunk` exactly one of `ChunkLanded` and `SlotQuiet` for that slot use, whatever happens to the lane;
* after `SendChunk` exactly one `ChunkSent` for that slot use, and once it is told, no byte of it leaves any more;
* `SlotQuiet` and `ChunkLanded` are about this end: a revoked slot stays out of use until the sender has answered
  `SendRevoke` too, or its lane is down;
* after `Dial` exactly one of `LaneUp` and `DialFailed`; after `CloseLane` or a loss exactly one `LaneDown`;
* a lane keeps the order of control messages, and delivers a prefix of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_kvrelay.core.effects import *  # noqa: F403  events and effects are one vocabulary
from isthmus_kvrelay.core.names import *  # noqa: F403
from isthmus_kvrelay.core.names import ClientId, FlowKey, Grant, LaneId, Offer, SlotUse
from isthmus_shared.errors import Fault
from isthmus_shared.ids import Incarnation

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
    retain_s: float = 0.0
    """Retained until then once it was delivered, if that is later than `deadline_s`."""


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
    pull: int = 1
    """Which attempt to fetch this transfer: a higher one takes it over from a lower one."""
    kv_tokens: int = 0
    """Tokens whose KV the consumer's engine will hold; 0 needs no room there."""


@dataclass(frozen=True, slots=True)
class StepReported:
    """The consumer's engine has made a decode step."""

    client: ClientId
    step_s: float
    kv_blocks_free: int
    kv_block_tokens: int


@dataclass(frozen=True, slots=True)
class ItlReported:
    client: ClientId
    itl_s: float
    target_s: float


@dataclass(frozen=True, slots=True)
class ReleaseSource:
    """The consumer reads that flow's slots no more: it is done, or it gives up."""

    client: ClientId
    key: FlowKey
    consumed: bool = False
    """It was told, by the relay or by the producer, that all is there, and has read it."""


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
    via: str = "tcp"
    """What carries its chunks; a name, for the counts."""
    depth: int | None = None
    """Chunks that the lane's transport can have under way to this relay; None: it sets no bound."""


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
    pull: int
    offer: Offer | None = None


@dataclass(frozen=True, slots=True)
class DeclinedReceived:
    lane: LaneId
    key: FlowKey
    pull: int


@dataclass(frozen=True, slots=True)
class OpenedReceived:
    lane: LaneId
    key: FlowKey
    pull: int
    total_bytes: int
    chunk_bytes: int
    manifest: str


@dataclass(frozen=True, slots=True)
class CreditReceived:
    lane: LaneId
    key: FlowKey
    pull: int
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class DoneReceived:
    lane: LaneId
    key: FlowKey
    pull: int


@dataclass(frozen=True, slots=True)
class AbortReceived:
    lane: LaneId
    key: FlowKey
    pull: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class RevokeReceived:
    lane: LaneId
    key: FlowKey
    pull: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class QuietReceived:
    lane: LaneId
    key: FlowKey
    pull: int


@dataclass(frozen=True, slots=True)
class FeedbackReceived:
    lane: LaneId
    itl_s: float
    target_s: float


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
class RatesSet:
    """The planner's ceilings in bytes per second; when `valid_s` has passed, the configured one holds again."""

    default: float | None
    by_peer: tuple[tuple[Incarnation, float], ...]
    valid_s: float


@dataclass(frozen=True, slots=True)
class HostCostMeasured:
    """What receiving one chunk costs this host, in microseconds of CPU."""

    us_per_chunk: float


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
    | StepReported
    | ItlReported
    | AbortByClient
    | LaneUp
    | LaneDown
    | DialFailed
    | PullReceived
    | DeclinedReceived
    | OpenedReceived
    | CreditReceived
    | DoneReceived
    | AbortReceived
    | RevokeReceived
    | QuietReceived
    | FeedbackReceived
    | ChunkLanded
    | SlotQuiet
    | ChunkSent
    | RatesSet
    | HostCostMeasured
    | Drain
    | Tick
)
