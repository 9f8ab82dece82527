"""A decode worker dies, or is asked to give its sequences away: streams go on, and no prompt is computed twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import Role, WorkerHeartbeat
from isthmus_shared.messages.work import MoveRequests, WorkerRef
from isthmus_testing.engines import Outcome, prompt_of
from isthmus_testing.local_cluster import LocalCluster, local_cluster
from isthmus_testing.openai_client import Case, aggregated, assert_same, client, stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ANSWER_S = 90.0
CLUSTER = """\
planner:
  env: {ISTHMUS_PLANNER_TTFT_FLOOR_S: "20", ISTHMUS_PLANNER_TRANSFER_FLOOR_S: "10", ISTHMUS_PLANNER_STALL_FLOOR_S: "15"}
nodes:
  - id: node-a
    workers:
      - {id: prefill-a, role: prefill, kv_layout: "nhd:16:fp32"}
  - id: node-b
    workers:
      - {id: decode-b, role: decode, kv_layout: "hnd:64:fp32:packed4"}
  - id: node-c
    workers:
      - {id: decode-c, role: decode, kv_layout: "nhd:32:fp32"}
"""
CASES = tuple(Case(prompt_of(200 + 37 * number, seed=number), max_tokens=300) for number in range(6))
PREFILLED = "isthmus_engine_tokens_total{phase=prefill}"
KV_OUT = "isthmus_worker_kv_out_bytes_total"


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Mapping[Case, Outcome]:
    return dict(zip(CASES, asyncio.run(aggregated(tiny_model, CASES)), strict=True))


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("recovery")
    file = folder / "cluster.yaml"
    file.write_text(CLUSTER, encoding="utf-8")
    with local_cluster([str(file), "--model", str(tiny_model)], folder / "state") as cluster:
        yield cluster


class AllDecode:
    """Set once every stream has had that many chunks, and so every prompt has been computed and fetched."""

    def __init__(self, streams: int, chunks: int = 4) -> None:
        self.reached = asyncio.Event()
        self._left = [chunks] * streams

    async def count(self, number: int) -> None:
        self._left[number] -= 1
        if max(self._left) <= 0:
            self.reached.set()


async def recoveries(cluster: LocalCluster, what: str) -> float:
    return (await cluster.metrics("ingress"))[f"isthmus_recoveries_total{{what={what}}}"]


async def streams_while(
    cluster: LocalCluster, expected: Mapping[Case, Outcome], happens: Callable[[], Awaitable[None]]
) -> None:
    """Once all decode, something happens; all streams go on to their right end, and nobody prefills meanwhile."""
    moment = AllDecode(len(CASES))
    async with client(cluster.url) as http, asyncio.timeout(ANSWER_S), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(stream(http, case, partial(moment.count, n))) for n, case in enumerate(CASES)]
        await moment.reached.wait()
        assert not any(task.done() for task in running), "the streams were too short to be in their middle"
        prefilled = (await cluster.metrics("prefill-a"))[PREFILLED]
        await happens()
    for case, task in zip(CASES, running, strict=True):
        assert task.result().error is None
        assert_same(task.result(), expected[case])
    assert (await cluster.metrics("prefill-a"))[PREFILLED] == prefilled, "no prompt was computed a second time"
    await cluster.until_idle()


async def test_a_killed_decode_workers_streams_go_on_from_the_staged_kv(
    cluster: LocalCluster, expected: Mapping[Case, Outcome]
) -> None:
    resumed = await recoveries(cluster, "resumed")

    async def kill() -> None:
        cluster.kill("decode-b")

    await streams_while(cluster, expected, kill)
    assert await recoveries(cluster, "resumed") > resumed


async def test_sequences_that_are_asked_to_move_go_on_on_the_other_decode_worker(
    cluster: LocalCluster, expected: Mapping[Case, Outcome]
) -> None:
    await cluster.until_idle()
    moved = await recoveries(cluster, "moved")
    busiest = ""

    async def move() -> None:
        nonlocal busiest  # the planner may have given all to one of them
        decode: list[WorkerHeartbeat] = []
        while not any(beat.load.running for beat in decode):  # as their next heartbeats say
            decode = [beat for beat in (await cluster.view()).workers if Role.DECODE in beat.roles]
        beat = max(decode, key=lambda beat: beat.load.running)
        busiest = beat.worker_id
        ref = WorkerRef(worker_id=beat.worker_id, incarnation=beat.incarnation, node_id=beat.node_id)
        bus = await NatsBus.connect(cluster.bus_url, name="operator")
        async with bus:
            await bus.publish(subjects.MOVE_REQUESTS, MoveRequests(worker=ref, why="a test wants it").encode())

    await streams_while(cluster, expected, move)
    assert await recoveries(cluster, "moved") > moved
    assert (await cluster.metrics(busiest))[KV_OUT] > 0
