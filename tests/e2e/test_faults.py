"""SIGKILL in mid stream: every client gets the full right answer or a typed error, in time, and nothing leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from isthmus_testing.engines import Outcome, prompt_of
from isthmus_testing.local_cluster import LocalCluster, local_cluster
from isthmus_testing.openai_client import Answer, Case, aggregated, assert_same, client, complete, stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

STREAMS = 8
TOKENS = 120
ANSWER_S = 60.0
"""Every stream must have ended by then: the request's own deadlines are shorter."""
ERRORS = {
    "bus_disconnected",
    "deadline_exceeded",
    "draining",
    "no_capacity",
    "no_responders",
    "party_lost",
    "stale_party",
    "transfer_failed",
    "unavailable",
}
CASES = [Case(prompt_of(40 + 37 * number, seed=number), max_tokens=TOKENS) for number in range(STREAMS)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[Outcome]:
    return asyncio.run(aggregated(tiny_model, CASES))


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with local_cluster(["--model", str(tiny_model)], tmp_path_factory.mktemp("faults") / "state") as cluster:
        yield cluster


class Halfway:
    """Set when every stream has begun and several tokens have come."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._chunks = [0] * STREAMS

    def counter(self, number: int) -> Callable[[], Awaitable[None]]:
        async def count() -> None:
            self._chunks[number] += 1
            if min(self._chunks) >= 4:
                self.reached.set()

        return count


async def streams_while(cluster: LocalCluster, happens: Callable[[], None]) -> list[Answer]:
    """All streams' ends; in their middle, something happens."""
    halfway = Halfway()
    async with client(cluster.url) as http, asyncio.timeout(ANSWER_S), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(stream(http, case, halfway.counter(n))) for n, case in enumerate(CASES)]
        await halfway.reached.wait()
        assert not any(task.done() for task in running), "the streams were too short to be in their middle"
        happens()
    return [task.result() for task in running]


@pytest.mark.parametrize("victim", ["decode-b", "prefill-a", "relay-node-a", "relay-node-b"])
async def test_a_killed_process_costs_no_client_a_wrong_or_missing_end(
    cluster: LocalCluster, expected: list[Outcome], victim: str
) -> None:
    restarts = cluster.restarts(victim)
    answers = await streams_while(cluster, lambda: cluster.kill(victim))
    for answer, right in zip(answers, expected, strict=True):
        if answer.error is None:
            assert_same(answer, right)
        else:
            assert answer.error["code"] in ERRORS, answer.error
            assert answer.token_ids == right.tokens[: len(answer.token_ids)], "what came before the error was right"
    await cluster.until_idle()
    assert cluster.restarts(victim) == restarts + 1
    async with client(cluster.url) as http:
        assert_same(await complete(http, CASES[0]), expected[0])
    await cluster.until_idle()


async def test_streams_outlive_the_planner_and_a_new_one_knows_the_cluster(
    cluster: LocalCluster, expected: list[Outcome]
) -> None:
    answers = await streams_while(cluster, lambda: cluster.kill("planner"))
    for answer, right in zip(answers, expected, strict=True):
        assert_same(answer, right)
    await cluster.until_idle()
    async with client(cluster.url) as http:
        assert_same(await complete(http, CASES[1]), expected[1])
