"""How an engine gives KV away and takes it in, without knowing what carries it.

`kvrelay.client` implements this over the node's relay; `kv_memory` in process, for tests. Bytes are canonical
(see `kv.manifest`), addressed by their offset in the flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from isthmus_shared.errors import Fault


class KvSink(Protocol):
    """The producer's end of one transfer. `map`, `filled` and `seal` may be called from an engine's own thread."""

    @property
    def total_bytes(self) -> int: ...

    def map(self, offset_bytes: int, size_bytes: int) -> Sequence[memoryview]:
        """Writable views (format B) of the staging memory behind that range, in order; together `size_bytes` long.

        Valid until `seal` or `abort`. Raises `TransferFailed` once the transfer has ended (relay lost, cancelled).
        """
        ...

    def filled(self, offset_bytes: int, size_bytes: int) -> None:
        """That range is written and final: it may be sent. Each byte is declared filled exactly once."""
        ...

    def seal(self) -> None:
        """All bytes are filled; the engine holds nothing of this transfer any more. Raises if bytes are missing."""
        ...

    def abort(self, fault: Fault) -> None:
        """End the transfer without completing it. Idempotent; after `seal` it does nothing."""
        ...


class KvSource(Protocol):
    """The consumer's end of one transfer."""

    @property
    def total_bytes(self) -> int: ...

    async def ready(self) -> None:
        """Returns when every byte has arrived and every chunk's checksum was verified.

        Raises `TransferFailed`, `ChecksumMismatch`, `PartyLost`, `StaleParty` or `DeadlineExceeded`; never hangs
        past the transfer's deadline.
        """
        ...

    def map(self, offset_bytes: int, size_bytes: int) -> Sequence[memoryview]:
        """Read-only views of the landed bytes, in order. Only between `ready` and `release`. Thread-safe."""
        ...

    def release(self) -> None:
        """The engine has copied what it needs (or gives up): staging may be reused. Idempotent."""
        ...
