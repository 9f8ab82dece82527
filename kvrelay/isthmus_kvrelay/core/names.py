"""What the core's events and effects name: clients, lanes, flows, slots, credit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType

from isthmus_shared.ids import Generation, TransferId

ClientId = NewType("ClientId", int)
"""One connection of one worker; never reused in a daemon's life."""
LaneId = NewType("LaneId", int)
"""One authenticated connection to one life of a peer; never reused in a daemon's life."""


class FlowKey(NamedTuple):
    """These three are tuples, since they are hashed and made for every chunk."""

    transfer_id: TransferId
    generation: Generation


class SlotUse(NamedTuple):
    """A slot and which use of it: what names an earlier use is recognised as late."""

    slot: int
    use: int


class Grant(NamedTuple):
    """Credit for one chunk: it may be sent into that slot use of the receiver."""

    chunk: int
    into: SlotUse


@dataclass(frozen=True, slots=True)
class Offer:
    """What a pull with credit presumes of the source, and the credit, which counts only if that is so."""

    total_bytes: int
    chunk_bytes: int
    manifest: str
    grants: tuple[Grant, ...]

    @property
    def content(self) -> tuple[int, str]:
        return self.total_bytes, self.manifest


class Side(StrEnum):
    OUT = "out"
    IN = "in"
