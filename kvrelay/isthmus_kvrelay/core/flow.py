"""The two ends of a flow: their states as tables, and what each remembers."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import StrEnum

from isthmus_kvrelay.core.events import ClientId, FlowKey, Grant, LaneId, SlotUse
from isthmus_shared.ids import Incarnation


class OutState(StrEnum):
    QUEUED = "queued"
    """Waits for its slots."""
    FILLING = "filling"
    SEALED = "sealed"
    """All is filled; the producer may die."""
    ENDED = "ended"


class OutInput(StrEnum):
    RESERVED = "reserved"
    SEAL = "seal"
    DELIVERED = "delivered"
    FAILED = "failed"


OUT_TABLE: dict[tuple[OutState, OutInput], OutState] = {
    (OutState.QUEUED, OutInput.RESERVED): OutState.FILLING,
    (OutState.QUEUED, OutInput.FAILED): OutState.ENDED,
    (OutState.FILLING, OutInput.SEAL): OutState.SEALED,
    (OutState.FILLING, OutInput.DELIVERED): OutState.ENDED,
    (OutState.FILLING, OutInput.FAILED): OutState.ENDED,
    (OutState.SEALED, OutInput.DELIVERED): OutState.ENDED,
    (OutState.SEALED, OutInput.FAILED): OutState.ENDED,
}


class InState(StrEnum):
    CONNECTING = "connecting"
    """Waits for a lane to the source."""
    PULLING = "pulling"
    """Has asked; waits for the source's answer."""
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
    OPENED = "opened"
    RESERVED = "reserved"
    COMPLETE = "complete"
    RELEASED = "released"
    FAILED = "failed"


IN_TABLE: dict[tuple[InState, InInput], InState] = {
    (InState.CONNECTING, InInput.LANE_UP): InState.PULLING,
    (InState.PULLING, InInput.OPENED): InState.QUEUED,
    (InState.QUEUED, InInput.RESERVED): InState.LANDING,
    (InState.LANDING, InInput.COMPLETE): InState.READY,
    (InState.ATTACHED, InInput.COMPLETE): InState.READY,
    (InState.READY, InInput.RELEASED): InState.ENDED,
    **{(state, InInput.FAILED): InState.ENDED for state in InState if state is not InState.ENDED},
}


def chunk_count(total_bytes: int, chunk_bytes: int) -> int:
    return -(-total_bytes // chunk_bytes)


@dataclass(slots=True)
class OutFlow:
    """A transfer in this relay's staging, on its way to one consumer."""

    key: FlowKey
    owner: ClientId | None
    """None once a sealed flow's producer is gone."""
    source: int
    """The producer's id, for fairness; stays when the producer is gone."""
    total_bytes: int
    chunk_bytes: int
    manifest: str
    deadline_s: float
    wait_until_s: float
    opened_s: float
    state: OutState = OutState.QUEUED
    slots: tuple[SlotUse, ...] = ()
    filled: set[int] = field(default_factory=set)
    lane: LaneId | None = None
    """The consumer's lane, once it has pulled; one consumer per flow."""
    local: bool = False
    """The consumer is a client of this relay."""
    credits: dict[int, Grant] = field(default_factory=dict)
    """Received and not spent, by chunk."""
    sendable: list[int] = field(default_factory=list)
    """Heap of the chunks that are filled and have unspent credit."""
    sending: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)

    @property
    def chunks(self) -> int:
        return chunk_count(self.total_bytes, self.chunk_bytes)

    @property
    def all_filled(self) -> bool:
        return bool(self.slots) and len(self.filled) == len(self.slots)

    @property
    def taken(self) -> bool:
        return self.local or self.lane is not None

    def size_of(self, chunk: int) -> int:
        return min(self.chunk_bytes, self.total_bytes - chunk * self.chunk_bytes)

    def fill(self, chunk: int) -> None:
        self.filled.add(chunk)
        if chunk in self.credits:
            heapq.heappush(self.sendable, chunk)

    def take_credit(self, grant: Grant) -> None:
        self.credits[grant.chunk] = grant
        if grant.chunk in self.filled:
            heapq.heappush(self.sendable, grant.chunk)

    def spend_credit(self) -> Grant:
        """For the first chunk that can be sent."""
        chunk = heapq.heappop(self.sendable)
        self.sending.add(chunk)
        return self.credits.pop(chunk)

    def advance(self, by: OutInput) -> None:
        self.state = OUT_TABLE[self.state, by]


@dataclass(slots=True)
class InFlow:
    """A transfer on its way to a consumer on this node."""

    key: FlowKey
    client: ClientId
    peer: Incarnation
    total_bytes: int
    manifest: str
    deadline_s: float
    opened_s: float
    state: InState
    lane: LaneId | None = None
    chunk_bytes: int = 0
    slots: tuple[SlotUse, ...] = ()
    landed: set[int] = field(default_factory=set)

    @property
    def chunks(self) -> int:
        return chunk_count(self.total_bytes, self.chunk_bytes)

    def size_of(self, chunk: int) -> int:
        return min(self.chunk_bytes, self.total_bytes - chunk * self.chunk_bytes)

    def in_flight(self) -> list[int]:
        """Chunks that were granted and have not landed."""
        if self.state is not InState.LANDING:
            return []
        return [chunk for chunk in range(len(self.slots)) if chunk not in self.landed]

    def advance(self, by: InInput) -> None:
        self.state = IN_TABLE[self.state, by]
