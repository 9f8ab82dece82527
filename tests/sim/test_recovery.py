"""Work is kept: the real services in virtual time, one thing going wrong, and what it may cost at most."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from isthmus_shared.messages import subjects
from isthmus_shared.messages.work import MoveRequests, SamplingParams
from isthmus_sim.cluster import Cluster, Size
from isthmus_sim.load import Ask, Outcome, answers_of_one_engine, prompt_of
from isthmus_sim.loop import run_world
from isthmus_sim.trace import Trace

ISL, OSL, REQUESTS = 200, 50, 4
"""All of them fit into either decode worker, so that nothing is computed anew for want of room."""
SLOW = 40.0
"""Of decode steps: streams last some ten seconds, so that whatever happens, happens in their middle."""


@dataclass
class Told:
    outcomes: list[Outcome]
    problems: list[str]
    prefilled: float
    """Prompt tokens that the prefill workers computed after it happened."""
    elsewhere: float
    """And the decode workers: of resumed sequences those that were sent, of others all."""
    recoveries: dict[str, float]


Happens = Callable[[Cluster], Awaitable[None]]


def told_of(happens: Happens, *, before_first_token: bool = False) -> Told:
    told = Told([], [], 0.0, 0.0, {})
    run_world(_world(happens, told, before_first_token))
    return told


async def _world(happens: Happens, told: Told, before_first_token: bool) -> None:
    asks = [
        Ask(f"client-{n}", 0.0, prompt_of(1, n, ISL), SamplingParams(max_tokens=OSL, seed=n, ignore_eos=True), None)
        for n in range(REQUESTS)
    ]
    wanted = await answers_of_one_engine(asks)
    cluster = Cluster(1, Trace(), Size(slots=256))  # room to retain all of it
    await cluster.start()
    slow = cluster.workers[:2] if before_first_token else cluster.workers[2:]
    for worker in slow:
        assert worker.runner is not None
        worker.runner.slowness = SLOW
    async with asyncio.TaskGroup() as clients:
        going = [clients.create_task(cluster.ask(ask)) for ask in asks]
        least = 0 if before_first_token else 5
        if before_first_token:  # all are with their workers, and the prefill workers are slow
            assert await cluster.settled(lambda: len(cluster.world.transfers) == REQUESTS)
        else:
            assert await cluster.settled(
                lambda: len(cluster.outcomes) == REQUESTS and all(len(o.tokens) >= least for o in cluster.outcomes)
            )
        before = _prefilled(cluster, 0), _prefilled(cluster, 2)
        with cluster.disturbed("test", 1.0):
            _hurry(cluster, 3)  # whoever takes over has room soon
            await happens(cluster)
            await asyncio.wait(going)
    told.outcomes = cluster.outcomes
    told.prefilled, told.elsewhere = _prefilled(cluster, 0) - before[0], _prefilled(cluster, 2) - before[1]
    told.recoveries = {what: _recovered(cluster, what) for what in ("resumed", "moved", "stayed")}
    for outcome in cluster.outcomes:
        right = outcome.error is None and (outcome.tokens, outcome.finish) == wanted[outcome.ask.name]
        told.problems += [] if right else [f"{outcome.request_text}: {outcome.error}"]
    for worker in cluster.workers:
        if worker.process is None:
            worker.start()
    for node in cluster.nodes:
        if node.process is None:
            node.start()
    await cluster.check_nothing_is_left()
    told.problems += cluster.world.problems
    await cluster.stop()


def _prefilled(cluster: Cluster, first: int) -> float:
    """By two workers, in their present lives."""
    runtimes = [worker.runtime for worker in cluster.workers[first : first + 2]]
    name, labels = "isthmus_engine_tokens_total", {"phase": "prefill"}
    return sum(r.metrics.registry.get_sample_value(name, labels) or 0.0 for r in runtimes if r is not None)


def _recovered(cluster: Cluster, what: str) -> float:
    (ingress,) = cluster.ingresses
    assert ingress.runtime is not None
    return ingress.runtime.metrics.registry.get_sample_value("isthmus_recoveries_total", {"what": what}) or 0.0


def _hurry(cluster: Cluster, number: int) -> None:
    runner = cluster.workers[number].runner
    assert runner is not None
    runner.slowness = 1.0


def _on(cluster: Cluster, number: int) -> int:
    """Sequences that decode worker decodes."""
    engine = cluster.workers[2 + number].engine
    return 0 if engine is None else engine.load().running


def test_where_nothing_happens_nobody_recovers() -> None:
    async def nothing(cluster: Cluster) -> None:
        assert _on(cluster, 0) > 0

    told = told_of(nothing)
    assert told == Told(told.outcomes, [], 0.0, 0.0, {"resumed": 0.0, "moved": 0.0, "stayed": 0.0})


def test_a_crashed_decode_workers_streams_are_resumed_without_a_second_prefill() -> None:
    async def crash(cluster: Cluster) -> None:
        assert _on(cluster, 0) > 0
        await cluster.workers[2].crash()

    told = told_of(crash)
    assert told.problems == []
    assert told.prefilled == 0
    assert told.elsewhere < ISL, "no prompt was computed again"
    assert told.recoveries["resumed"] > 0


def test_with_nobody_else_to_decode_its_next_life_goes_on_without_a_second_prefill() -> None:
    async def crash_both(cluster: Cluster) -> None:
        for worker in cluster.workers[2:]:
            await worker.crash()
        await asyncio.sleep(1.0)
        cluster.workers[2].start()

    told = told_of(crash_both)
    assert told.problems == []
    assert told.prefilled == 0
    assert told.elsewhere < ISL, "no prompt was computed again"
    assert told.recoveries["resumed"] == REQUESTS


def test_a_decode_worker_that_crashes_during_the_prefill_costs_no_second_one() -> None:
    async def crash(cluster: Cluster) -> None:
        assert all(outcome.first_s is None for outcome in cluster.outcomes)
        await cluster.workers[2].crash()

    told = told_of(crash, before_first_token=True)
    assert told.problems == []
    assert told.prefilled <= REQUESTS * ISL, "each prompt was computed once"


def test_an_outage_of_the_bus_costs_no_second_prefill() -> None:
    async def cut(cluster: Cluster) -> None:
        cluster.world.broker.disconnect()
        await asyncio.sleep(4.0)
        cluster.world.broker.reconnect()

    told = told_of(cut)
    assert told.problems == []
    assert told.prefilled == 0
    assert told.elsewhere < ISL, "no prompt was computed again"


def test_when_the_relay_that_kept_the_kv_is_gone_as_well_the_prompt_is_computed_again() -> None:
    async def lose_both(cluster: Cluster) -> None:
        for node in cluster.nodes[:2]:
            await node.crash()
        await cluster.workers[2].crash()
        await asyncio.sleep(0.5)
        for node in cluster.nodes[:2]:
            node.start()

    told = told_of(lose_both)
    assert told.problems == []
    assert told.prefilled + told.elsewhere >= ISL, "nothing else was left to do"


def test_sequences_move_when_they_are_asked_to() -> None:
    async def move(cluster: Cluster) -> None:
        host = cluster.workers[2].host
        assert host is not None
        assert _on(cluster, 0) > 0
        bus = cluster.world.broker.client("operator")
        await bus.publish(subjects.MOVE_REQUESTS, MoveRequests(worker=host.worker, why="a test").encode())
        assert await cluster.settled(lambda: _on(cluster, 0) == 0, within_s=3.0), "they left in mid stream"
        await bus.close()

    told = told_of(move)
    assert told.problems == []
    assert told.prefilled == 0
    assert told.elsewhere < ISL, "no prompt was computed again"
    assert told.recoveries["moved"] > 0


def test_a_worker_that_drains_moves_what_would_not_finish_in_time() -> None:
    async def drain(cluster: Cluster) -> None:
        worker = cluster.workers[2]
        assert worker.runner is not None
        worker.runner.slowness = 2 * SLOW
        assert _on(cluster, 0) > 0
        await worker.drain()
        await asyncio.sleep(1.0)
        worker.start()

    told = told_of(drain)
    assert told.problems == []
    assert told.prefilled == 0
    assert told.elsewhere < ISL, "no prompt was computed again"
    assert told.recoveries["moved"] > 0
    assert told.recoveries["resumed"] == 0, "nobody was cut off"
