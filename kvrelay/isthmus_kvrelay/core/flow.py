"""The two ends of a flow: their states as tables, and what each remembers."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import StrEnum

from isthmus_kvrelay.core.names import ClientId, FlowKey, Grant, LaneId, SlotUse
from isthmus_shared.errors import IsthmusError, ManifestMismatch
from isthmus_shared.ids import Incarnation


class OutState(StrEnum):
    GATED = "gated"
    """Waits for its client's share of the pool."""
    QUEUED = "queued"
    """Waits for its slots."""
    FILLING = "filling"
    SEALED = "sealed"
    """All is filled; the producer may die."""
    RETAINED = "retained"
    """Over, but its bytes are still there for another destination, until somebody needs the room."""
    ENDED = "ended"


class OutInput(StrEnum):
    ADMITTED = "admitted"
    RESERVED = "reserved"
    SEAL = "seal"
    RETAIN = "retain"
    PULLED = "pulled"
    DELIVERED = "delivered"
    FAILED = "failed"
    EVICTED = "evicted"


OUT_TABLE: dict[tuple[OutState, OutInput], OutState] = {
    (OutState.GATED, OutInput.ADMITTED): OutState.QUEUED,
    (OutState.GATED, OutInput.FAILED): OutState.ENDED,
    (OutState.QUEUED, OutInput.RESERVED): OutState.FILLING,
    (OutState.QUEUED, OutInput.FAILED): OutState.ENDED,
    (OutState.FILLING, OutInput.SEAL): OutState.SEALED,
    (OutState.FILLING, OutInput.FAILED): OutState.ENDED,
    (OutState.SEALED, OutInput.RETAIN): OutState.RETAINED,
    (OutState.SEALED, OutInput.DELIVERED): OutState.ENDED,
    (OutState.SEALED, OutInput.FAILED): OutState.ENDED,
    (OutState.RETAINED, OutInput.PULLED): OutState.SEALED,
    (OutState.RETAINED, OutInput.EVICTED): OutState.ENDED,
}


class InState(StrEnum):
    CONNECTING = "connecting"
    """Waits for a lane to the source."""
    PULLING = "pulling"
    """Has asked; waits for the source's answer."""
    BLOCKED = "blocked"
    """Waits for KV blocks of its consumer's engine."""
    GATED = "gated"
    """Waits for its client's share of the pool."""
    QUEUED = "queued"
    """Waits for landing slots."""
    LANDING = "landing"
    ATTACHED = "attached"
    """The source is this relay: waits for the producer to fill the rest of its slots."""
    READY = "ready"
    """All has landed and was verified; the consumer reads."""
    ENDED = "ended"


class InInput(StrEnum):
    LANE_UP = "lane_up"
    PRESUMED = "presumed"
    """Its pull will carry credit."""
    STEP_BACK = "step_back"
    """It could not, or the source declined."""
    OPENED = "opened"
    ROOM = "room"
    ADMITTED = "admitted"
    RESERVED = "reserved"
    COMPLETE = "complete"
    RELEASED = "released"
    FAILED = "failed"


_RESERVING = (InState.BLOCKED, InState.GATED, InState.QUEUED, InState.LANDING)
IN_TABLE: dict[tuple[InState, InInput], InState] = {
    (InState.CONNECTING, InInput.LANE_UP): InState.PULLING,
    (InState.PULLING, InInput.OPENED): InState.BLOCKED,
    (InState.PULLING, InInput.PRESUMED): InState.BLOCKED,
    (InState.BLOCKED, InInput.ROOM): InState.GATED,
    (InState.GATED, InInput.ADMITTED): InState.QUEUED,
    (InState.QUEUED, InInput.RESERVED): InState.LANDING,
    (InState.LANDING, InInput.COMPLETE): InState.READY,
    (InState.ATTACHED, InInput.COMPLETE): InState.READY,
    (InState.READY, InInput.RELEASED): InState.ENDED,
    **{(state, InInput.STEP_BACK): InState.PULLING for state in _RESERVING},
    **{(state, InInput.FAILED): InState.ENDED for state in InState if state is not InState.ENDED},
}


def mismatch_of(*, source: tuple[int, str], consumer: tuple[int, str]) -> ManifestMismatch | None:
    """How the total bytes and manifests that the two ends named differ."""
    if source[0] != consumer[0]:
        why = f"source {source[0]}, consumer {consumer[0]}"
        return ManifestMismatch("total_bytes differ", why=why, param="total_bytes")
    if source[1] != consumer[1]:
        return ManifestMismatch("manifests differ", why=f"source {source[1]}, consumer {consumer[1]}", param="manifest")
    return None


def chunk_count(total_bytes: int, chunk_bytes: int) -> int:
    return -(-total_bytes // chunk_bytes)


@dataclass(slots=True)
class OutFlow:
    """A transfer in this relay's staging, on its way to one consumer at a time."""

    key: FlowKey
    owner: ClientId | None
    """None once a sealed flow's producer is gone."""
    source: ClientId
    """The producer, for fairness and its share of the pool; stays when it is gone."""
    total_bytes: int
    chunk_bytes: int
    manifest: str
    deadline_s: float
    wait_until_s: float
    opened_s: float
    retain_until_s: float = 0.0
    """Takes the deadline's place once it is retained."""
    state: OutState = OutState.GATED
    counted: bool = False
    """Against its client's share of the pool."""
    slots: tuple[SlotUse, ...] = ()
    filled: set[int] = field(default_factory=set)
    filled_s: dict[int, float] = field(default_factory=dict)
    """When each chunk became ready to go (filled and credited), until it is sent."""
    pull: int = 0
    """The newest attempt to fetch it; older ones are refused."""
    lane: LaneId | None = None
    """The consumer's lane, once it has pulled; one consumer at a time."""
    local: bool = False
    """The consumer is a client of this relay."""
    orphaned_by: IsthmusError | None = None
    """How its last consumer was lost while it was still being filled."""
    orphaned_until_s: float = 0.0
    credits: dict[int, Grant] = field(default_factory=dict)
    """Received and not spent, by chunk."""
    sendable: list[int] = field(default_factory=list)
    """Heap of the chunks that are filled, have unspent credit and are not under way to an earlier consumer."""
    sending: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)
    """Chunks still under way to an earlier consumer: they are sent to the next one only after that."""

    @property
    def content(self) -> tuple[int, str]:
        return self.total_bytes, self.manifest

    @property
    def chunks(self) -> int:
        return chunk_count(self.total_bytes, self.chunk_bytes)

    @property
    def all_filled(self) -> bool:
        return bool(self.slots) and len(self.filled) == len(self.slots)

    @property
    def all_sent(self) -> bool:
        return bool(self.slots) and len(self.sent) + len(self.sending) == len(self.slots)

    @property
    def taken(self) -> bool:
        return self.local or self.lane is not None

    def size_of(self, chunk: int) -> int:
        return min(self.chunk_bytes, self.total_bytes - chunk * self.chunk_bytes)

    def fill(self, chunk: int, now_s: float) -> None:
        self.filled.add(chunk)
        self._make_sendable(chunk, now_s)

    def take_credit(self, grant: Grant, now_s: float) -> None:
        self.credits[grant.chunk] = grant
        self._make_sendable(grant.chunk, now_s)

    def has_left(self, chunk: int, now_s: float) -> None:
        """A chunk to an earlier consumer is no longer under way."""
        self.leaving.discard(chunk)
        self._make_sendable(chunk, now_s)

    def _make_sendable(self, chunk: int, now_s: float) -> None:
        if chunk in self.credits and chunk in self.filled and chunk not in self.leaving:
            heapq.heappush(self.sendable, chunk)
            self.filled_s[chunk] = now_s

    def spend_credit(self) -> Grant:
        """For the first chunk that can be sent."""
        chunk = heapq.heappop(self.sendable)
        self.sending.add(chunk)
        return self.credits.pop(chunk)

    def leave_consumer(self) -> None:
        """Whoever had it has it no more; what is filled stays."""
        self.lane, self.local = None, False
        self.leaving |= self.sending
        self.sending, self.sent, self.credits, self.sendable = set(), set(), {}, []
        self.filled_s = {}

    def advance(self, by: OutInput) -> None:
        self.state = OUT_TABLE[self.state, by]


@dataclass(slots=True)
class InFlow:
    """A transfer on its way to a consumer on this node."""

    key: FlowKey
    pull: int
    client: ClientId
    peer: Incarnation
    total_bytes: int
    kv_tokens: int
    manifest: str
    deadline_s: float
    opened_s: float
    state: InState
    lane: LaneId | None = None
    chunk_bytes: int = 0
    slots: tuple[SlotUse, ...] = ()
    counted: bool = False
    """Against its client's share of the pool."""
    eager: bool = False
    """Its credit travels with the pull."""
    held: bool = False
    """Its consumer has been told the slots, so they are its own until it lets go."""
    consumed: bool = False
    """Its consumer, told by the producer, was done before the relay heard that all is filled."""
    kv_blocks: int = 0
    """Granted by the consumer's engine and not yet used or returned."""
    granted: int = 0
    """Chunks below it have been granted."""
    in_flight: dict[int, int] = field(default_factory=dict)
    """Granted and not landed: chunk → host microseconds that it was granted at."""
    granted_s: dict[int, float] = field(default_factory=dict)
    landed: set[int] = field(default_factory=set)

    @property
    def content(self) -> tuple[int, str]:
        return self.total_bytes, self.manifest

    @property
    def chunks(self) -> int:
        return chunk_count(self.total_bytes, self.chunk_bytes)

    def size_of(self, chunk: int) -> int:
        return min(self.chunk_bytes, self.total_bytes - chunk * self.chunk_bytes)

    def step_back(self) -> None:
        """It holds nothing any more, and waits for the source's answer."""
        assert not self.landed
        self.slots, self.chunk_bytes, self.granted, self.eager = (), 0, 0, False
        self.advance(InInput.STEP_BACK)

    def advance(self, by: InInput) -> None:
        self.state = IN_TABLE[self.state, by]
