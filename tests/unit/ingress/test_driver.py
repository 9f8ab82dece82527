"""The shell round the saga: what goes wrong in one request's steps stays in it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from isthmus_ingress.cancels import Cancels
from isthmus_ingress.driver import Deps, RunningSaga, Work
from isthmus_ingress.outbox import Outbox
from isthmus_ingress.saga import Saga
from isthmus_ingress.saga_types import End
from isthmus_shared.bus.memory import MemoryBroker, MemoryBus
from isthmus_shared.bus.port import BusMessage
from isthmus_shared.ids import RequestId, TransferId
from isthmus_shared.messages.work import SamplingParams
from isthmus_shared.metrics import Metrics


class BuggyBus(MemoryBus):
    """Its `request` meets a bug of our own."""

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> BusMessage:
        raise ZeroDivisionError("a bug")


async def test_a_bug_in_one_requests_step_ends_that_request_typed_and_no_other() -> None:
    bus = BuggyBus(MemoryBroker(), "buggy")
    log = structlog.get_logger()
    ended: list[RunningSaga] = []
    async with asyncio.TaskGroup() as tasks:
        cancels = Cancels(bus, log)
        deps = Deps(bus, "events", tasks, cancels, Metrics(), log)
        outboxes = [Outbox(asyncio.get_running_loop()) for _ in range(2)]
        for index, outbox in enumerate(outboxes):
            saga = Saga(max_tokens=4, deadline_s=1e9, max_attempts=3, route_patience_s=15)
            work = Work(RequestId(f"r{index}"), TransferId(f"t{index}"), "demo", (1, 2), SamplingParams(max_tokens=4))
            RunningSaga(saga, work, deps, outbox, 0, ended.append).start()
        async with asyncio.timeout(5):
            ends = [(await outbox.take())[-1][1] for outbox in outboxes]
    assert [type(end) for end in ends] == [End, End]
    assert [end.error.code for end in ends if isinstance(end, End) and end.error] == ["internal_error"] * 2
    assert len(ended) == 2
