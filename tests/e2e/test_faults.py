"""SIGKILL in mid stream: every client gets the full right answer or a typed error, in time, and nothing leaks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from isthmus_testing.engines import Outcome, prompt_of
from isthmus_testing.local_cluster import LocalCluster, local_cluster
from isthmus_testing.openai_client import Answer, Case, aggregated, assert_same, client, complete, stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ANSWER_S = 60.0
"""Every stream must have ended by then: the request's own deadlines are shorter."""
ERRORS = {
    "bus_disconnected",
    "deadline_exceeded",
    "draining",
    "no_responders",
    "party_lost",
    "stale_party",
    "transfer_failed",
    "unavailable",
}
VICTIMS = ["decode-b", "prefill-a", "relay-node-a", "relay-node-b"]
CLUSTER = """\
planner:
  env: {ISTHMUS_PLANNER_TTFT_FLOOR_S: "15", ISTHMUS_PLANNER_TRANSFER_FLOOR_S: "5", ISTHMUS_PLANNER_STALL_FLOOR_S: "8"}
nodes:
  - id: node-a
    workers:
      - {id: prefill-a, role: prefill, kv_layout: "nhd:16:fp32"}
  - id: node-b
    workers:
      - {id: decode-b, role: decode, kv_layout: "hnd:64:fp32:packed4"}
"""
"""The demo, with the shortest deadlines that a busy machine of two cores meets: a lost message costs seconds."""
SPARE = """\
      - {id: decode-c, role: decode, kv_layout: "nhd:32:fp32"}
"""


@dataclass(frozen=True)
class Moment:
    """When it happens: as soon as `streams` of the cases have had `chunks` chunks of tokens."""

    cases: tuple[Case, ...]
    streams: int
    chunks: int


MOMENTS = {
    "while all decode": Moment(
        tuple(Case(prompt_of(40 + 37 * number, seed=number), max_tokens=120) for number in range(8)), 8, 4
    ),
    "while prompts are computed and cross": Moment(
        tuple(Case(prompt_of(1500 + 16 * number, seed=number), max_tokens=30) for number in range(4)), 1, 1
    ),
}
Expected = Mapping[Case, Outcome]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Expected:
    cases = [case for moment in MOMENTS.values() for case in moment.cases]
    return dict(zip(cases, asyncio.run(aggregated(tiny_model, cases)), strict=True))


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with started(CLUSTER, tiny_model, tmp_path_factory.mktemp("faults")) as cluster:
        yield cluster


@contextmanager
def started(text: str, model: Path, folder: Path) -> Iterator[LocalCluster]:
    file = folder / "cluster.yaml"
    file.write_text(text, encoding="utf-8")
    with local_cluster([str(file), "--model", str(model)], folder / "state") as cluster:
        yield cluster


class Progress:
    """Of some streams; `reached` is set at the moment."""

    def __init__(self, moment: Moment) -> None:
        self.reached = asyncio.Event()
        self._moment = moment
        self._chunks = [0] * len(moment.cases)

    def counter(self, number: int) -> Callable[[], Awaitable[None]]:
        async def count() -> None:
            self._chunks[number] += 1
            if sum(chunks >= self._moment.chunks for chunks in self._chunks) >= self._moment.streams:
                self.reached.set()

        return count


async def streams_while(cluster: LocalCluster, moment: Moment, happens: Callable[[], None]) -> list[Answer]:
    """All streams' ends; in their middle, something happens."""
    progress = Progress(moment)
    async with client(cluster.url) as http, asyncio.timeout(ANSWER_S), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(stream(http, case, progress.counter(n))) for n, case in enumerate(moment.cases)]
        await progress.reached.wait()
        assert not any(task.done() for task in running), "the streams were too short to be in their middle"
        happens()
    return [task.result() for task in running]


@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("victim", VICTIMS)
async def test_a_killed_process_costs_no_client_a_wrong_or_missing_end(
    cluster: LocalCluster, expected: Expected, victim: str, when: str
) -> None:
    moment = MOMENTS[when]
    answers = await killed_amid(cluster, victim, moment, expected)
    # Without decode-b nobody decodes: then a re-plan waits for its restart.
    assert [answer.error for answer in answers if answer.error is not None] == []
    await still_serves(cluster, moment.cases[0], expected)


async def test_the_bus_may_die_in_mid_stream(cluster: LocalCluster, expected: Expected) -> None:
    moment = MOMENTS["while all decode"]
    await killed_amid(cluster, "nats-server", moment, expected)
    await still_serves(cluster, moment.cases[0], expected)


async def test_with_another_decode_worker_every_stream_goes_on_to_its_right_end(
    tiny_model: Path, tmp_path: Path, expected: Expected
) -> None:
    moment = MOMENTS["while all decode"]
    with started(CLUSTER + SPARE, tiny_model, tmp_path) as cluster:
        answers = await killed_amid(cluster, "decode-b", moment, expected)
        assert all(answer.error is None for answer in answers)
        await still_serves(cluster, moment.cases[0], expected)


async def killed_amid(cluster: LocalCluster, victim: str, moment: Moment, expected: Expected) -> list[Answer]:
    """SIGKILL at the moment. Every answer is full and right, or right as far as it goes and then a typed error."""
    restarts = cluster.restarts(victim)
    answers = await streams_while(cluster, moment, lambda: cluster.kill(victim))
    for case, answer in zip(moment.cases, answers, strict=True):
        right = expected[case]
        if answer.error is None:
            assert_same(answer, right)
        else:
            assert answer.error["code"] in ERRORS, answer.error
            assert answer.token_ids == right.tokens[: len(answer.token_ids)], "what came before the error was right"
    await cluster.until_idle()
    assert cluster.restarts(victim) == restarts + 1
    return answers


async def still_serves(cluster: LocalCluster, case: Case, expected: Expected) -> None:
    async with client(cluster.url) as http:
        assert_same(await complete(http, case), expected[case])
    await cluster.until_idle()


async def test_streams_outlive_the_planner_and_a_new_one_knows_the_cluster(
    cluster: LocalCluster, expected: Expected
) -> None:
    moment = MOMENTS["while all decode"]
    answers = await streams_while(cluster, moment, lambda: cluster.kill("planner"))
    for case, answer in zip(moment.cases, answers, strict=True):
        assert_same(answer, expected[case])
    await cluster.until_idle()
    async with client(cluster.url) as http:
        assert_same(await complete(http, moment.cases[1]), expected[moment.cases[1]])


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "cut off"])
async def test_new_requests_go_by_the_last_plan_while_no_planner_answers(
    cluster: LocalCluster, expected: Expected, signal_number: signal.Signals
) -> None:
    await cluster.until_planned()
    await cluster.until_led()
    moment = MOMENTS["while all decode"]
    pid = cluster.pid("planner")
    os.kill(pid, signal_number)
    try:
        async with client(cluster.url) as http, asyncio.timeout(ANSWER_S):
            answers = await asyncio.gather(*(complete(http, case) for case in moment.cases))
    finally:
        if signal_number is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    for case, answer in zip(moment.cases, answers, strict=True):
        assert_same(answer, expected[case])
    await cluster.until_idle()
