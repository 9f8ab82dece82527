"""Keeps this planner's lease: asks the bucket what `Lease` wants to know, for as long as the process runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from structlog.typing import FilteringBoundLogger

from isthmus_planner.leader.bucket import LeaseStore
from isthmus_planner.leader.lease import Lease, LeaseTimes, Read
from isthmus_shared.errors import IsthmusError
from isthmus_shared.ids import Incarnation

OPEN_AGAIN_S = 1.0
"""Between two tries to make the bucket: a bus without JetStream is asked once a second, and says so once a minute."""
COMPLAIN_S = 60.0


class LeaseKeeper:
    """A `Leadership`. `heard_epoch` gives the highest epoch that anyone has told of."""

    def __init__(
        self,
        store: LeaseStore,
        me: Incarnation,
        log: FilteringBoundLogger,
        *,
        heard_epoch: Callable[[], int],
        times: LeaseTimes | None = None,
    ) -> None:
        self._times = times or LeaseTimes()
        self._lease = Lease(me, self._times)
        self._store, self._log, self._heard_epoch = store, log, heard_epoch
        self._led: int | None = None
        self._complained_s = -COMPLAIN_S
        self.problem = ""
        """Why the bucket does not answer; empty while it does."""

    @property
    def epoch(self) -> int | None:
        return self._lease.epoch(now_s=_now_s())

    async def run(self) -> None:
        """Until cancelled; then the lease is given up, so that another can lead at once."""
        try:
            await self._open()
            while True:
                self._note()
                await self._wait()
                await self._turn()
        finally:
            await self._release()

    async def _wait(self) -> None:
        """Until the next question is due, or the leadership ends, which is worth a line in the log."""
        await asyncio.sleep(max(0.0, self._lease.next_s - _now_s()))

    async def _turn(self) -> None:
        question = self._lease.ask(now_s=_now_s(), floor=self._heard_epoch())
        timeout_s = self._times.answer_s
        try:
            if isinstance(question, Read):
                record = await self._store.read(timeout_s=timeout_s)
                self._lease.found(record, now_s=_now_s())
            else:
                revision = await self._store.write(question, timeout_s=timeout_s)
                if revision is None:
                    self._lease.refused(now_s=_now_s())
                else:
                    self._lease.written(revision, now_s=_now_s())
            self.problem = ""
        except IsthmusError as error:
            self._lease.unknown(now_s=_now_s())
            self._complain(error)
            if error.code == "unavailable":  # the bus has lost the bucket, perhaps
                await self._open()

    async def _open(self) -> None:
        while True:
            try:
                await self._store.open(timeout_s=self._times.answer_s)
                return
            except IsthmusError as error:
                self._complain(error)
                self._note()
                await asyncio.sleep(OPEN_AGAIN_S)

    async def _release(self) -> None:
        write = self._lease.release()
        self._note()
        if write is not None:
            with contextlib.suppress(IsthmusError):  # then it runs out
                await self._store.write(write, timeout_s=self._times.answer_s)

    def _complain(self, error: IsthmusError) -> None:
        self.problem = error.text
        if _now_s() - self._complained_s >= COMPLAIN_S:
            self._complained_s = _now_s()
            self._log.warning("leader.bucket_unreachable", code=error.code, why=error.text)

    def _note(self) -> None:
        epoch = self.epoch
        if epoch != self._led:
            event = "leader.ended" if epoch is None else "leader.begun"
            self._log.info(event, epoch=self._led if epoch is None else epoch)
            self._led = epoch


def _now_s() -> float:
    return asyncio.get_running_loop().time()
