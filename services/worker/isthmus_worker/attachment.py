"""The worker's hold on its node's relay: made, lost, made again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from structlog.typing import FilteringBoundLogger

from isthmus_shared.errors import Fault, IsthmusError, TransferFailed
from isthmus_shared.messages.work import RelayRef
from isthmus_worker.ports import RelayConnect, RelayLink

BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 2.0
"""A relay that restarts is back within a second or so; two seconds keep the socket quiet while it is not."""

RELAY_LOST = Fault(
    code=TransferFailed.code, what="the node's relay was lost", why="its socket closed while the KV was on its way"
)


class Attachment:
    """Keeps one `RelayLink` while `run` runs. With `connect` None there never is one."""

    def __init__(self, connect: RelayConnect | None, log: FilteringBoundLogger) -> None:
        self._connect = connect
        self._log = log
        self._link: RelayLink | None = None
        self.attached = asyncio.Event()
        """Set while there is a link."""

    @property
    def configured(self) -> bool:
        return self._connect is not None

    @property
    def relay(self) -> RelayRef | None:
        return None if self._link is None else self._link.relay

    @property
    def link(self) -> RelayLink | None:
        return self._link

    def require(self) -> RelayLink:
        """The link, or `TransferFailed` when there is none now."""
        if self._link is None or self._link.lost.is_set():
            raise TransferFailed(
                "this worker has no relay", why="its socket is not connected", todo="ask another worker"
            )
        return self._link

    async def run(self, changed: Callable[[], Awaitable[None]], lost: Callable[[Fault], Awaitable[None]]) -> None:
        """Attaches, waits for the loss, tells `lost`, attaches again; `changed` after each gain and loss."""
        if self._connect is None:
            return
        loop, backoff_s = asyncio.get_running_loop(), BACKOFF_MIN_S
        try:
            while True:
                self._link = await self._attach(self._connect)
                attached_s = loop.time()
                self.attached.set()
                self._log.info("relay.attached", relay=self._link.relay.address, node=self._link.relay.node_id)
                await changed()
                await self._link.lost.wait()
                self._log.warning("relay.lost", relay=self._link.relay.address)
                gone, self._link = self._link, None
                self.attached.clear()
                await changed()
                await lost(RELAY_LOST)
                await gone.close()
                backoff_s = BACKOFF_MIN_S if loop.time() - attached_s > BACKOFF_MAX_S else backoff_s * 2
                await asyncio.sleep(min(backoff_s, BACKOFF_MAX_S))  # one that drops us at once is not hammered
        finally:
            self.attached.clear()

    async def close(self) -> None:
        """Lets go of the relay; what is sealed there stays."""
        if self._link is not None:
            link, self._link = self._link, None
            await link.close()

    async def _attach(self, connect: RelayConnect) -> RelayLink:
        backoff_s = BACKOFF_MIN_S
        while True:
            try:
                return await connect()
            except IsthmusError as error:
                self._log.warning("relay.unreachable", error=error.text, retry_s=backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
