"""The leading planner and real workers: what is asked for decides who has which model."""

from __future__ import annotations

import asyncio
from typing import Any

from isthmus_shared.ids import RequestId
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import ProcessState, RelayRates, Role
from isthmus_shared.messages.route import RouteReply, RouteRequest, Slo
from isthmus_testing.worker_stack import Stack, Worker, cluster, ref

BOTH = (Role.PREFILL, Role.DECODE)
LEADS: dict[str, Any] = {"leader": "sole", "model_hold_s": 1.0}
FAST: dict[str, Any] = {"linger_s": 0.0}


async def ask_for(stack: Stack, number: int, model: str, slo: Slo | None = None) -> None:
    request = RouteRequest(request_id=RequestId(f"r{number}"), model=model, isl_tokens=400, max_osl_tokens=100, slo=slo)
    await stack.ask(subjects.ROUTE, request, RouteReply)


async def ready(stack: Stack, model: str) -> list[Any]:
    beats = (await stack.view()).workers
    return [beat for beat in beats if beat.model == model and beat.state is ProcessState.READY]


async def test_a_model_that_is_asked_for_gets_a_worker_of_one_that_is_not() -> None:
    async with cluster(**LEADS) as stack:
        spare: list[Worker] = []
        for number, role in enumerate((Role.PREFILL, Role.DECODE, Role.DECODE)):
            spare.append(await stack.worker(f"a{number}", role, able=BOTH, models=("other=",), **FAST))
        for number, role in enumerate(BOTH):
            await stack.worker(f"b{number}", role, able=BOTH, model_name="other", **FAST)
        number = 0
        async with asyncio.timeout(60):
            while len(await ready(stack, "other")) < 3:
                number += 1
                await ask_for(stack, number, "other")
        moved = [beat for beat in await ready(stack, "other") if beat.worker_id.startswith("a")]
        assert ref(moved[0]) in [worker.host.worker for worker in spare]
        assert moved[0].epoch >= 1
        assert len(await ready(stack, "isthmus-demo")) == 2


async def test_lanes_get_ceilings_where_requests_were_promised_a_latency() -> None:
    async with cluster(**LEADS) as stack:
        prefiller = await stack.worker("p", Role.PREFILL)
        decoder = await stack.worker("d", Role.DECODE)
        async with stack.bus.subscribe(subjects.RELAY_RATES) as published, asyncio.timeout(60):
            await ask_for(stack, 1, "isthmus-demo", Slo(itl_s=0.05))
            rates = RelayRates.decode((await anext(published)).data)
        assert rates.epoch >= 1
        (lane,) = rates.lanes
        links = stack.hub.links
        assert lane.sender == links[prefiller.host.worker.worker_id].relay.incarnation
        assert lane.receiver == links[decoder.host.worker.worker_id].relay.incarnation
