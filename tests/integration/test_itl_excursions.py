"""The real services in virtual time: one thing is made late, and the ingress' counter says which."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from isthmus_shared.messages.work import SamplingParams
from isthmus_shared.metrics import ITL_CAUSES
from isthmus_sim.cluster import Cluster
from isthmus_sim.load import Ask, Outcome, serve
from isthmus_sim.loop import run_world
from isthmus_sim.trace import Trace
from isthmus_sim.weather import CALM_DELAY_S

OSL_TOKENS = 80


def slow_steps(cluster: Cluster, slow: bool) -> None:
    for worker in cluster.workers:
        assert worker.runner is not None
        worker.runner.slowness = 20.0 if slow else 1.0


def slow_bus(cluster: Cluster, slow: bool) -> None:
    cluster.world.weather.delay_s = 0.3 if slow else CALM_DELAY_S


@pytest.mark.parametrize(("disturb", "cause"), [(slow_steps, "step"), (slow_bus, "bus"), (None, None)])
def test_what_was_slow_is_what_is_counted(disturb: Callable[[Cluster, bool], None] | None, cause: str | None) -> None:
    counted: dict[str, float] = {}

    async def main() -> None:
        cluster = Cluster(3, Trace())
        await cluster.start()
        sampling = SamplingParams(max_tokens=OSL_TOKENS, temperature=0, ignore_eos=True)
        outcome = Outcome(Ask("client", 0.0, tuple(range(60)), sampling, None))
        ingress = cluster.ingresses[0]
        assert ingress.frontend is not None
        assert ingress.runtime is not None
        registry = ingress.runtime.metrics.registry
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve(ingress.frontend, outcome))
            for tokens, slow in ((OSL_TOKENS // 2, True), (OSL_TOKENS // 2 + 3, False)):
                assert await cluster.settled(lambda tokens=tokens: len(outcome.tokens) >= tokens, poll_s=0.001)
                if disturb is not None:
                    disturb(cluster, slow)
        assert len(outcome.tokens) == OSL_TOKENS
        for each in ITL_CAUSES:
            counted[each] = registry.get_sample_value("isthmus_itl_excursions_total", {"cause": each}) or 0
        await cluster.stop()
        assert cluster.world.problems == []

    run_world(main())
    assert {each for each, count in counted.items() if count} == ({cause} if cause else set())
