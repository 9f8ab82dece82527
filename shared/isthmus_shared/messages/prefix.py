"""What workers have in their prefix caches, told to planners: changes as they come, everything when asked.

A hint: one that is wrong or lost costs time, never a wrong token. Hashes are `isthmus_shared.prefix`'s, packed one
after the other, `PREFIX_HASH_BYTES` each.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from isthmus_shared.errors import Fault
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.base import WireMessage
from isthmus_shared.messages.route import PREFIX_HASH_BYTES
from isthmus_shared.messages.work import WorkerRef

MAX_TOLD_HASHES = 8192
"""In one message: half a million tokens' in 64 kB. More are told in several."""
MAX_SNAPSHOT_HASHES = 65_536
"""4 million tokens' in 512 kB, half of what NATS carries by default. Of more, the beginnings of prompts are told."""


def _whole(packed: bytes) -> bytes:
    if len(packed) % PREFIX_HASH_BYTES:
        raise ValueError(f"packed hashes are a multiple of {PREFIX_HASH_BYTES} bytes")
    return packed


Told = Annotated[bytes, Field(max_length=PREFIX_HASH_BYTES * MAX_TOLD_HASHES), AfterValidator(_whole)]
Snapshot = Annotated[bytes, Field(max_length=PREFIX_HASH_BYTES * MAX_SNAPSHOT_HASHES), AfterValidator(_whole)]


class PrefixEvents(WireMessage):
    """What one worker has stored and removed since its event before. Who misses one asks for a snapshot."""

    KIND: ClassVar[str] = "prefix_events"

    worker: WorkerRef
    sequence: int = Field(gt=0)
    """One more than the last one's."""
    stored: Told = b""
    removed: Told = b""


class PrefixSnapshotRequest(WireMessage):
    KIND: ClassVar[str] = "prefix_snapshot_request"

    incarnation: Incarnation
    """The life of the worker that is meant."""


class PrefixSnapshot(WireMessage):
    """Everything that a worker has cached, events up to `sequence` included; or why not."""

    KIND: ClassVar[str] = "prefix_snapshot"

    sequence: int = Field(default=0, ge=0)
    hashes: Snapshot = b""
    fault: Fault | None = None
