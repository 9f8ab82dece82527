"""Cancels on their way. Each is sent until it is acknowledged, over an outage of the bus too, within bounds."""

from __future__ import annotations

import asyncio

from structlog.typing import FilteringBoundLogger

from isthmus_shared.bus.port import Bus
from isthmus_shared.errors import BusDisconnected, IsthmusError
from isthmus_shared.ids import WorkerId
from isthmus_shared.messages import subjects
from isthmus_shared.messages.work import Ack, Cancel

CANCEL_TIMEOUT_S = 2.0
CANCEL_TRIES = 8
"""While the bus is in reach. A Cancel is idempotent; what eight tries don't reach is left to the workers' leases."""
RETRY_S = 0.25
"""After a failure. With the tries: a worker that reconnects later than we do has two seconds for it."""
MAX_KEPT = 8192
"""Cancels that wait at once: two for each of twice the requests that are in progress by default."""
KEEP_S = 60.0
"""For the bus to come back. By then the workers have ended by themselves what an ingress they don't hear asked for."""


class Cancels:
    """One per ingress. `send` returns when there is no more to do; `close` ends all waiting, for the process ends."""

    def __init__(self, bus: Bus, log: FilteringBoundLogger) -> None:
        self._bus, self._log = bus, log
        self._waiting: dict[asyncio.Timeout, None] = {}  # no set: its order would differ from run to run
        self._closed = False

    async def send(self, worker_id: WorkerId, cancel: Cancel) -> None:
        subject, data = subjects.worker_cancel(worker_id), cancel.encode()
        until_s = asyncio.get_running_loop().time() + KEEP_S
        attempt = 0
        while attempt == 0 or await self._wait(until_s):
            try:
                attempt += 1
                answer = await self._bus.request(subject, data, timeout_s=CANCEL_TIMEOUT_S)
                Ack.decode(answer.data)
                return
            except BusDisconnected:
                attempt = 1  # once it is back, all of them are left
            except IsthmusError as error:
                self._log.info(
                    "cancel.unanswered",
                    request_id=cancel.request_id,
                    worker_id=worker_id,
                    attempt=attempt,
                    code=error.code,
                )
            if attempt >= CANCEL_TRIES:
                break
        self._log.warning("cancel.given_up", request_id=cancel.request_id, worker_id=worker_id)

    def close(self) -> None:
        """Nothing is waited for any more; what is being sent gets its answer."""
        self._closed = True
        now_s = asyncio.get_running_loop().time()
        for waiting in self._waiting:
            waiting.reschedule(now_s)

    async def _wait(self, until_s: float) -> bool:
        """A moment, and until the bus is in reach. False when that is too long, or for too many."""
        if self._closed or len(self._waiting) >= MAX_KEPT:
            return False
        try:
            async with asyncio.timeout_at(until_s) as waiting:
                self._waiting[waiting] = None
                try:
                    await asyncio.sleep(RETRY_S)
                    await self._bus.wait_connected()
                finally:
                    del self._waiting[waiting]
        except (TimeoutError, BusDisconnected):  # the latter: this client is closed
            return False
        return True
