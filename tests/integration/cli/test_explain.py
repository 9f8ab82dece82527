"""`isthmus explain` with a planner on a bus: it is asked, it answers, and it learns what became of the request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from rich.console import Console

from isthmus_cli import explain
from isthmus_cli.shapes import SHAPES
from isthmus_planner.config import PlannerConfig
from isthmus_planner.service import PlannerService
from isthmus_shared.bus.memory import MemoryBroker
from isthmus_shared.bus.port import Bus
from isthmus_shared.bus.server import EmbeddedNats
from isthmus_shared.errors import InvalidRequest, NoResponders
from isthmus_shared.ids import Incarnation, IngressId, RequestId
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import ProcessState, Role
from isthmus_shared.messages.outcomes import Explanation, Outcome, Outcomes
from isthmus_shared.messages.route import Mode, RouteReply
from isthmus_shared.service import ServiceRuntime
from isthmus_testing.clusters import ask as a_request
from isthmus_testing.clusters import worker
from isthmus_testing.waiting import eventually

WAIT_S = 30.0


@asynccontextmanager
async def planner(broker: MemoryBroker) -> AsyncIterator[Bus]:
    """A planner that knows two workers."""
    bus = broker.client()
    runtime = ServiceRuntime("planner", PlannerConfig(), bus=broker.client(), serve_http=False)
    async with runtime, asyncio.TaskGroup() as tasks:
        tasks.create_task(PlannerService(runtime).run())
        await eventually(lambda: runtime.state is ProcessState.READY)
        for beat in (worker("p", Role.PREFILL), worker("d", Role.DECODE)):
            await bus.publish(subjects.HEARTBEAT_WORKER, beat.encode())
        yield bus
        runtime.stopping.set()


async def route(bus: Bus, name: str) -> RouteReply:
    async with asyncio.timeout(WAIT_S):
        while True:
            answer = await bus.request(subjects.ROUTE, a_request(100, name=name).encode(), timeout_s=WAIT_S)
            reply = RouteReply.decode(answer.data)
            if reply.route is not None:
                return reply
            await bus.wait_connected()


async def told(bus: Bus, name: str, *, with_outcome: bool) -> list[Explanation]:
    async with asyncio.timeout(WAIT_S):
        while True:
            found = await explain.ask(bus, name, answer_s=1.0, others_s=0.05)
            if not with_outcome or found[-1].outcome is not None:
                return found


async def test_a_route_is_explained_and_afterwards_what_happened() -> None:
    async with planner(MemoryBroker()) as bus:
        reply = await route(bus, "mine~1")
        assert reply.route is not None
        (before,) = await told(bus, "mine", with_outcome=False)
        assert before.chosen is not None
        assert before.chosen.predicted == reply.route.predicted
        assert before.outcome is None
        assert [each.request_id for each in await told(bus, "chatcmpl-mine", with_outcome=False)] == ["mine~1"]
        outcome = Outcome(
            request_id=RequestId("mine~1"),
            model="demo",
            isl_tokens=100,
            osl_tokens=16,
            ttft_s=0.1,
            itl_s=0.01,
            e2el_s=0.25,
            finish="length",
        )
        message = Outcomes(ingress_id=IngressId("i"), ingress=Incarnation("l"), outcomes=(outcome,))
        await bus.publish(subjects.OUTCOMES, message.encode())
        found = await told(bus, "mine", with_outcome=True)
        assert found[-1].outcome == outcome
    assert SHAPES["explain"].problems(json.loads(json.dumps(explain.as_fields(found)))) == []
    text = shown(*found)
    for expected in ("mine~1", "100 prompt tokens", "length after 16 tokens", "it was the only one", "100 ms"):
        assert expected in text
    assert "off by" in text
    assert "%" in text
    (only,) = found
    again = only.model_copy(update={"outcome": outcome.model_copy(update={"attempts": 2})})
    assert "%" not in shown(again), "its times are the client's over both attempts"


async def test_an_unknown_request_is_an_error_that_says_what_to_do() -> None:
    async with planner(MemoryBroker()) as bus:
        with pytest.raises(InvalidRequest, match="no planner knows the request 'nobody'") as caught:
            await explain.ask(bus, "nobody", answer_s=0.2)
    assert "x-request-id" in caught.value.todo


async def test_without_a_planner_that_is_said_at_once(nats_server: EmbeddedNats) -> None:
    with pytest.raises(NoResponders):
        await explain.fetch(nats_server.url, "mine")


def shown(*explanations: Explanation) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(*explain.shown(list(explanations)), sep="\n")
    return captured.get()


async def test_one_that_goes_on_from_staged_kv_is_said_to_and_choices_are_counted_apart() -> None:
    async with planner(MemoryBroker()) as bus:
        for name in ("mine~1", "mine~2", "mine~1"):
            await route(bus, name)
        found = await told(bus, "mine", with_outcome=False)
    assert sorted(each.request_id for each in found) == ["mine~1", "mine~1", "mine~2"]
    text = shown(*found)
    for expected in ("route 1 of 2 of mine~1", "route 2 of 2 of mine~1", "route of mine~2"):
        assert expected in text
    assert "staged" not in text
    resumed = found[0].chosen
    assert resumed is not None
    resumed = resumed.model_copy(update={"prefill": None})
    text = shown(found[0].model_copy(update={"chosen": resumed, "candidates": (resumed,)}))
    assert "goes on from staged KV" in text
    assert "(staged)" in text
    alone = resumed.model_copy(update={"mode": Mode.AGGREGATED})
    text = shown(found[0].model_copy(update={"chosen": alone, "candidates": (alone,)}))
    assert "staged" not in text
    assert "(same)" in text
