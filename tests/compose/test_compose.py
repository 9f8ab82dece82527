"""`docker compose up`, and every container killed and cut off in turn under load: `make compose-test`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping

import httpx
import pytest
from openai import AsyncOpenAI

from isthmus_shared import demo_model
from isthmus_testing.compose_cluster import (
    BUS_NET,
    HEALTHY_S,
    LANES_NET,
    ComposeCluster,
    why_not,
)
from isthmus_testing.engines import Outcome, prompt_of
from isthmus_testing.openai_client import MODEL, Answer, Case, aggregated, assert_same, client, complete, stream

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(1800),
]

STREAMS = 16
CASES = tuple(Case(prompt_of(40 + 11 * number, seed=number), max_tokens=150) for number in range(STREAMS))
ANSWER_S = 120.0
SERVICES = ("nats", "planner", "ingress", "relay-a", "prefill-a", "relay-b", "decode-b")
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
Expected = Mapping[Case, Outcome]


@pytest.fixture(scope="module")
def expected() -> Expected:
    return dict(zip(CASES, asyncio.run(aggregated(demo_model.FOLDER, CASES)), strict=True))


async def test_the_openai_sdk_gets_a_streamed_answer_that_crossed(cluster: ComposeCluster) -> None:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as openai:
        chunks = [
            chunk
            async for chunk in await openai.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=16, stream=True
            )
        ]
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
    roles = {worker.worker_id: list(worker.roles) for worker in (await cluster.view()).workers}
    assert roles == {"prefill-a": ["prefill"], "decode-b": ["decode"]}
    await cluster.until_settled()


def test_containers_are_confined(cluster: ComposeCluster) -> None:
    for service in SERVICES:
        found = cluster.inspect(service)
        host = found["HostConfig"]
        assert host["ReadonlyRootfs"], service
        assert host["CapDrop"] == ["ALL"], service
        assert found["Config"]["User"] not in ("", "0", "root"), service
        assert host["Memory"] > 0, service
        assert host["RestartPolicy"]["Name"] == "unless-stopped", service
        shown = json.dumps(found)
        for role, secret in (("planner", "nats_url"), ("worker", "nats_url"), ("relay", "relay_secret")):
            value = cluster.secret(role, secret)
            assert value not in shown, f"{service} shows the {role}'s {secret}"


@pytest.mark.parametrize("victim", SERVICES)
async def test_a_killed_container_costs_no_client_a_wrong_or_missing_end(
    cluster: ComposeCluster, expected: Expected, victim: str
) -> None:
    restarts = cluster.restarts(victim)
    await under_load(
        cluster, expected, lambda: asyncio.to_thread(cluster.kill, victim), lost_ingress=victim == "ingress"
    )
    assert cluster.restarts(victim) == restarts + 1
    await still_right(cluster, expected)


@pytest.mark.parametrize(
    ("service", "network"),
    [*((name, BUS_NET) for name in ("planner", "ingress", "prefill-a", "decode-b", "relay-b")), ("relay-a", LANES_NET)],
)
async def test_a_partitioned_container_costs_no_client_a_wrong_or_missing_end(
    cluster: ComposeCluster, expected: Expected, service: str, network: str
) -> None:
    with contextlib.ExitStack() as cuts:

        async def cut() -> None:
            await asyncio.to_thread(cuts.enter_context, cluster.cut_off(service, network))

        await under_load(cluster, expected, cut, settle=False)
    assert await cluster.until_settled() <= HEALTHY_S
    await still_right(cluster, expected)


async def under_load(
    cluster: ComposeCluster,
    expected: Expected,
    happens: Callable[[], Awaitable[None]],
    *,
    lost_ingress: bool = False,
    settle: bool = True,
) -> None:
    """16 streams; as half of them have had tokens, something happens. Every end is right, or typed and right so far."""
    begun, reached = [0], asyncio.Event()

    def counter() -> Callable[[], Awaitable[None]]:
        first = [True]

        async def count() -> None:
            begun[0] += first[0]
            first[0] = False
            if begun[0] >= STREAMS // 2:
                reached.set()

        return count

    async with client(cluster.url) as http, asyncio.timeout(ANSWER_S), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(ended(http, case, counter())) for case in CASES]
        await reached.wait()
        await happens()
    for case, task in zip(CASES, running, strict=True):
        check(task.result(), expected[case], lost_ingress=lost_ingress)
    if settle:
        assert await cluster.until_settled() <= HEALTHY_S


async def ended(http: httpx.AsyncClient, case: Case, count: Callable[[], Awaitable[None]]) -> Answer | None:
    """None when the connection broke."""
    try:
        return await stream(http, case, count)
    except httpx.TransportError:
        return None


def check(answer: Answer | None, right: Outcome, *, lost_ingress: bool) -> None:
    if answer is None:
        assert lost_ingress, "only its own ingress' death may break a client's connection"
    elif answer.error is None:
        assert_same(answer, right)
    else:
        assert answer.error["code"] in ERRORS, answer.error
        assert answer.token_ids == right.tokens[: len(answer.token_ids)], "what came before the error was right"


async def still_right(cluster: ComposeCluster, expected: Expected) -> None:
    async with client(cluster.url) as http:
        assert_same(await complete(http, CASES[3]), expected[CASES[3]])


def test_the_logs_tell_one_json_object_a_line(cluster: ComposeCluster) -> None:
    """The last of all: what the services said during everything above."""
    for service in SERVICES:
        if service == "nats":
            continue
        lines = cluster.log_lines(service)
        assert lines, service
        for line in lines:
            assert "event" in json.loads(line), f"{service}: {line}"


def test_the_images_of_ingress_and_planner_hold_no_torch(cluster: ComposeCluster) -> None:
    for service in ("ingress", "planner", "relay-a"):
        found = cluster.compose(
            "exec", "-T", service, "python", "-c", "import importlib.util as u; print(u.find_spec('torch'))"
        )
        assert found.strip() == "None", service
