"""The main job: prefill on one worker, decode on another whose KV layout differs, and the answer is an aggregated
engine's to the token. Over TCP between two nodes and over one node's memory, in both directions of the layouts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from isthmus_testing.engines import Outcome, prompt_of
from isthmus_testing.local_cluster import LocalCluster, local_cluster
from isthmus_testing.openai_client import Case, aggregated, assert_same, client, complete

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 1000, 4000)
"""Around both block sizes (16 and 64), beyond the sliding window (128), and over several prefill chunks (256)."""
CONCURRENT = 32
MIRRORED = """\
nodes:
  - id: node-a
    workers:
      - {id: prefill-a, role: prefill, vendor: amd, kv_layout: "hnd:64:fp32:packed4"}
  - id: node-b
    workers:
      - {id: decode-b, role: decode, vendor: nvidia, kv_layout: "nhd:16:fp32"}
"""
Expected = Mapping[Case, Outcome]


def lengths() -> list[Case]:
    return [Case(prompt_of(length, seed=length)) for length in LENGTHS]


def mixed() -> list[Case]:
    """Short and long, greedy and seeded."""
    sizes = (3, 16, 40, 64, 100, 129, 257, 500)
    return [
        Case(
            prompt_of(sizes[number % len(sizes)], seed=100 + number),
            max_tokens=4 + number % 13,
            temperature=0.0 if number % 2 else 0.9,
            seed=number,
        )
        for number in range(CONCURRENT)
    ]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Expected:
    cases = [*lengths(), *mixed()]
    return dict(zip(cases, asyncio.run(aggregated(tiny_model, cases)), strict=True))


@pytest.fixture(scope="module", params=["tcp", "tcp-mirrored", "shm", "shm-mirrored"])
def crossing(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp(request.param)
    arguments = ["--model", str(tiny_model)]
    way: str = request.param
    if way.endswith("mirrored"):
        file = folder / "mirrored.yaml"
        file.write_text(MIRRORED, encoding="utf-8")
        arguments = [str(file), *arguments]
    if way.startswith("shm"):
        arguments.append("--same-node")
    with local_cluster(arguments, folder / "state") as cluster:
        yield cluster


async def test_prompts_of_any_length_give_the_aggregated_engines_tokens_and_logprobs(
    crossing: LocalCluster, expected: Expected
) -> None:
    async with client(crossing.url) as http:
        for case in lengths():
            assert_same(await complete(http, case), expected[case])
    await assert_all_crossed(crossing, len(LENGTHS))


async def test_many_mixed_requests_at_once_do_not_disturb_one_another(
    crossing: LocalCluster, expected: Expected
) -> None:
    before = await crossings(crossing)
    async with client(crossing.url) as http:
        answers = await asyncio.gather(*(complete(http, case) for case in mixed()))
    for case, answer in zip(mixed(), answers, strict=True):
        assert_same(answer, expected[case])
    await assert_all_crossed(crossing, before + CONCURRENT)


async def crossings(cluster: LocalCluster) -> int:
    """Requests whose KV the decode worker has loaded."""
    samples = await cluster.metrics("decode-b")
    return int(samples.get("isthmus_worker_transfer_seconds_count", 0))


async def assert_all_crossed(cluster: LocalCluster, requests: int) -> None:
    """Every request so far was handed over, its bytes really went the way of this cluster, and nothing is left."""
    view = await cluster.until_idle()
    assert await crossings(cluster) == requests
    produced, consumed = await cluster.metrics("prefill-a"), await cluster.metrics("decode-b")
    kv_bytes = produced["isthmus_worker_kv_out_bytes_total"]
    assert kv_bytes == consumed["isthmus_worker_kv_in_bytes_total"] > 0
    assert produced["isthmus_worker_finishes_total{phase=prefill}{reason=handoff}"] == requests
    if len(view.relays) == 2:
        by_node = {beat.relay.node_id: beat for beat in view.relays}
        assert by_node["node-a"].sent_bytes == kv_bytes
        assert by_node["node-b"].received_bytes == kv_bytes
