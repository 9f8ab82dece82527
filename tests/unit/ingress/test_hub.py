"""What workers publish, at the ingress: one message that meets a bug is one message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import structlog

from isthmus_ingress.driver import Said
from isthmus_ingress.hub import Hub
from isthmus_ingress.roster import Roster
from isthmus_shared.bus.memory import MemoryBroker
from isthmus_shared.ids import Generation, Incarnation, NodeId, RequestId, WorkerId
from isthmus_shared.messages.work import FinishReason, SequenceEvent, StepEvents, WorkerRef
from isthmus_shared.metrics import Metrics
from isthmus_testing.waiting import eventually

WORKER = WorkerRef(worker_id=WorkerId("w"), incarnation=Incarnation("life"), node_id=NodeId("n"))


class Listener:
    """Stands for a request's saga."""

    def __init__(self, request_id: str, *, breaks: bool = False) -> None:
        self.work = SimpleNamespace(request_id=RequestId(request_id))
        self.breaks = breaks
        self.heard: list[int] = []

    def take(self, _life: Incarnation, event: SequenceEvent, _step: Any) -> None:
        assert not self.breaks, "a bug"
        self.heard += event.token_ids

    def flow(self, life: Incarnation, event: Any, step: Any, _now_s: float) -> bool:
        self.take(life, event, step)
        return True

    def flow_together(self, said: Sequence[Said], _now_s: float) -> bool:
        for steps, event in said:
            self.flow(steps.worker.incarnation, event, steps.step, 0.0)
        return True


def said(request_id: str, token: int, finish: FinishReason | None = None) -> bytes:
    event = SequenceEvent(
        request_id=RequestId(request_id),
        generation=Generation(1),
        output_index=0,
        token_ids=(token,),
        finish=finish,
    )
    return StepEvents(worker=WORKER, events=(event,)).encode()


async def test_a_message_that_meets_a_bug_or_is_none_ends_nobody_elses_stream() -> None:
    broker = MemoryBroker()
    bus, worker = broker.client("ingress"), broker.client("worker")
    hub = Hub(bus, "events", Roster(), Metrics(), structlog.get_logger())
    well, ill = Listener("well"), Listener("ill", breaks=True)
    for each in (well, ill):
        hub.add(each)  # type: ignore[arg-type]
    running = asyncio.create_task(hub.run())
    await hub.ready.wait()
    for data in (said("well", 1), said("ill", 2), said("ill", 3, FinishReason.STOP), b"noise", said("well", 4)):
        await worker.publish("events", data)
    await eventually(lambda: well.heard == [1, 4])
    running.cancel()
    await asyncio.wait({running})


async def test_a_bug_that_one_event_meets_is_that_events_however_many_came_with_it() -> None:
    class Sore(Listener):
        """Meets a bug at token 3, and whenever it takes several at once."""

        def take(self, life: Incarnation, event: SequenceEvent, step: Any) -> None:
            assert 3 not in event.token_ids, "a bug"
            super().take(life, event, step)

        def flow_together(self, said: Sequence[Said], _now_s: float) -> bool:
            raise ZeroDivisionError("a bug")

    broker = MemoryBroker()
    bus, worker = broker.client("ingress"), broker.client("worker")
    hub = Hub(bus, "events", Roster(), Metrics(), structlog.get_logger())
    sore = Sore("sore")
    hub.add(sore)  # type: ignore[arg-type]
    running = asyncio.create_task(hub.run())
    await hub.ready.wait()
    for token, finish in ((1, None), (2, None), (3, None), (4, None), (5, FinishReason.STOP)):
        await worker.publish("events", said("sore", token, finish))
    await eventually(lambda: sore.heard == [1, 2, 4, 5])
    running.cancel()
    await asyncio.wait({running})
