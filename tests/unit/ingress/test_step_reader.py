"""Steps that came together are taken together, and come to the same as one by one."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_ingress.cancels import Cancels
from isthmus_ingress.driver import Deps, RunningSaga, Work
from isthmus_ingress.outbox import Outbox
from isthmus_ingress.saga import Saga
from isthmus_ingress.saga_types import Answered, Begin, Call, Deliver, Event, Output, Routed
from isthmus_ingress.step_reader import StepReader
from isthmus_shared.bus.memory import MemoryBroker
from isthmus_shared.bus.port import BusMessage
from isthmus_shared.errors import ProtocolViolation
from isthmus_shared.ids import Generation, NodeId, RequestId, TransferId, WorkerId
from isthmus_shared.messages.work import (
    FinishReason,
    SamplingParams,
    SequenceEvent,
    StepEvents,
    StepFacts,
    TokenLogprob,
    WorkerRef,
)
from isthmus_shared.metrics import Metrics
from isthmus_testing.saga_world import TICKET, make_route, worker

GENERATION, MAX_TOKENS = Generation(1), 24
P1, D1, STRANGER = (worker(name).incarnation for name in ("p1", "d1", "x1"))
NAMES = ("a", "b", "gone")


def event(name: str, index: int, tokens: tuple[int, ...], **fields: Any) -> SequenceEvent:
    given = {"generation": GENERATION, **fields}
    return SequenceEvent(request_id=RequestId(name), output_index=index, token_ids=tokens, **given)


def decoding(name: str) -> Saga:
    """It has heard prefill's token and decode's first."""
    saga = Saga(max_tokens=MAX_TOKENS, deadline_s=1e9, max_attempts=1, route_patience_s=1.0)
    route = make_route(1)
    assert route.prefill is not None
    events: tuple[Event, ...] = (
        Begin(),
        Routed(GENERATION, route),
        Answered(Call.PREFILL, GENERATION, TICKET),
        Answered(Call.DECODE, GENERATION),
        Output(route.prefill.incarnation, event(name, 0, (0,), finish=FinishReason.HANDOFF)),
        Answered(Call.START, GENERATION),
        Output(route.decode.incarnation, event(name, 1, (1,))),
    )
    for each in events:
        saga.handle(each, now_s=0.0)
    assert saga.flow is not None
    return saga


class Silence(asyncio.TaskGroup):
    """What a saga has to tell workers is not told."""

    def create_task(self, coro: Any, **_: Any) -> Any:
        coro.close()


class World:
    """Two requests that decode, and a reader of steps."""

    def __init__(self) -> None:
        loop, log = asyncio.get_running_loop(), structlog.get_logger()
        bus = MemoryBroker().client("ingress")
        deps = Deps(bus, "events", Silence(), Cancels(bus, log), Metrics(), log)
        self.outboxes = {name: Outbox(loop) for name in NAMES[:2]}
        self.sagas = {
            RequestId(name): RunningSaga(decoding(name), self.work(name), deps, outbox, 0, lambda _: None)
            for name, outbox in self.outboxes.items()
        }
        self.malformed: list[str] = []
        self.reader = StepReader(self.sagas, lambda: 1.0, self.note, log)

    def work(self, name: str) -> Work:
        return Work(RequestId(name), TransferId(f"t-{name}"), "demo", (1, 2), SamplingParams(max_tokens=MAX_TOKENS))

    def note(self, subject: str, _error: ProtocolViolation) -> None:
        self.malformed.append(subject)

    async def found(self) -> dict[str, Any]:
        """All that came of it: what the answers are made of, and how their sagas stand."""
        answers = {name: await self.answer(name, outbox) for name, outbox in self.outboxes.items()}
        return {**answers, "malformed": self.malformed}

    async def answer(self, name: str, outbox: Outbox) -> Any:
        outbox.close()
        running = self.sagas[RequestId(name)]
        told: list[Any] = []
        for _, item in await outbox.take():
            tokens = item if isinstance(item, list) else item.token_ids if isinstance(item, Deliver) else item
            told += list(tokens) if isinstance(tokens, list | tuple) else [repr(tokens)]
        saga = running.saga
        return told, list(saga.output), saga.state, saga.over, repr(saga.error), running.cached_tokens


ODD = ("finish", "cached", "again", "gap", "older", "logprobs", "stranger", "prefill", "noise")


@st.composite
def messages(draw: st.DrawFn) -> list[bytes]:
    """Steps in which nothing, one or two things are not usual."""
    following, found = dict.fromkeys(NAMES, 2), []
    odd = draw(st.dictionaries(st.integers(0, 7), st.sampled_from(ODD), max_size=2))
    for number in range(draw(st.integers(1, 10))):
        kind, events = odd.get(number, ""), []
        for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)):
            index, count = following[name], draw(st.sampled_from([1, 1, 1, 2, 0]))
            unusual: dict[str, dict[str, Any]] = {
                "finish": {"finish": draw(st.sampled_from([FinishReason.STOP, FinishReason.ERROR]))},
                "cached": {"cached_tokens": 1},
                "older": {"generation": Generation(2)},
                "logprobs": {"logprobs": (TokenLogprob(logprob=-1.0),) * count},
            }
            fields = unusual.get(kind, {})
            index += {"again": -1, "gap": 1}.get(kind, 0)
            events.append(event(name, index, tuple(range(index, index + count)), **fields))
            following[name] = max(following[name], index + count)
        life = {"stranger": STRANGER, "prefill": P1}.get(kind, D1)
        ref = WorkerRef(worker_id=WorkerId("w"), incarnation=life, node_id=NodeId("n"))
        facts = StepFacts(number=number, ended_s=number, step_s=0.1, decode_sequences=2, prefill_tokens=0)
        found.append(b"noise" if kind == "noise" else StepEvents(worker=ref, events=tuple(events), step=facts).encode())
    return found


@settings(max_examples=300)
@given(messages())
def test_steps_that_came_together_are_taken_as_one_by_one(said: list[bytes]) -> None:
    async def run(at_once: int) -> dict[str, Any]:
        world = World()
        steps = [BusMessage("events", data) for data in said]
        for first in range(0, len(steps), at_once):
            world.reader.take(steps[first : first + at_once])
        return await world.found()

    one_by_one = asyncio.run(run(1))
    assert asyncio.run(run(len(said))) == one_by_one
    assert one_by_one["malformed"] == ["events"] * said.count(b"noise")
