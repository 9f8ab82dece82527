"""What the worker needs of its node's relay. `isthmus_kvrelay.client.RelayClient` is one; tests bring their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from isthmus_shared.engines.kv_port import KvSink, KvSource
from isthmus_shared.errors import Fault
from isthmus_shared.ids import Generation, TransferId
from isthmus_shared.kv.manifest import KvManifest
from isthmus_shared.messages.work import KvTicket, RelayRef


class RelayLink(Protocol):
    """One live attachment to the relay. After `lost` is set it is of no more use, and another must be made."""

    @property
    def relay(self) -> RelayRef: ...

    @property
    def lost(self) -> asyncio.Event: ...

    async def open_sink(
        self,
        transfer_id: TransferId,
        generation: Generation,
        manifest: KvManifest,
        *,
        deadline_s: float,
        wait_s: float,
        retain_s: float = 0.0,
    ) -> KvSink:
        """Reserves staging for the whole transfer; waits at most `wait_s` for room, then `StagingFull`. Once it was
        fetched, it may be kept until `retain_s` for another to fetch."""
        ...

    async def open_source(self, ticket: KvTicket, *, deadline_s: float) -> KvSource: ...

    async def abort(self, transfer_id: TransferId, generation: Generation, fault: Fault) -> None:
        """Ends a transfer of ours, sealed or not. Unknown: ignored."""
        ...

    def report_step(self, *, step_s: float, kv_blocks_free: int, kv_block_tokens: int) -> None:
        """What the engine can take now; after each step that decodes, and at times in between."""
        ...

    def report_itl(self, itl_ms: float, target_ms: float) -> None:
        """Measured inter-token latency against the target: senders slow down above it."""
        ...

    async def close(self) -> None: ...


RelayConnect = Callable[[], Awaitable[RelayLink]]
"""Makes one attachment, or raises an `IsthmusError`."""
