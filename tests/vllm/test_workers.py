"""vLLM in the worker services, KV through real relays: whoever prefills and whoever decodes, the same tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus_testing.engines import prompt_of
from isthmus_testing.local_cluster import LocalCluster, local_cluster
from isthmus_testing.openai_client import Answer, Case, aggregated, assert_same, client, complete, stream
from isthmus_testing.tiny_checkpoints import Family, write_tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TOLERANCE = 5e-4
"""Of logprobs, between two implementations in fp32."""
VLLM = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 2048}
VLLM |= {"kv_cache_memory_bytes": 32 << 20, "max_num_batched_tokens": 512, "max_num_seqs": 16}
PROMPTS = (1, 31, 32, 33, 5, 700, 1300)
SAMPLED = Case(prompt_of(90, seed=4), temperature=0.9, seed=11)


def worker(name: str, role: str, engine: str, **vllm: Any) -> dict[str, Any]:
    if engine == "vllm":
        return {"id": name, "role": role, "engine": engine, "vllm": VLLM | vllm}
    return {"id": name, "role": role, "kv_layout": "hnd:64:fp32:packed4"}


def cluster_file(folder: Path, model: Path, prefill: dict[str, Any], decode: dict[str, Any]) -> Path:
    """JSON is YAML."""
    nodes = [{"id": "node-a", "workers": [prefill]}, {"id": "node-b", "workers": [decode]}]
    path = folder / "cluster.yaml"
    path.write_text(json.dumps({"model": {"path": str(model)}, "nodes": nodes}))
    return path


def cases() -> list[Case]:
    return [Case(prompt_of(tokens, seed=tokens)) for tokens in PROMPTS]


async def crossed(cluster: LocalCluster) -> float:
    """Bytes that the decode side has loaded."""
    return (await cluster.metrics("decode"))["isthmus_worker_kv_in_bytes_total"]


@pytest.mark.parametrize("family", [Family.LLAMA, Family.QWEN3])
@pytest.mark.parametrize(("producer", "consumer"), [("reference", "vllm"), ("vllm", "reference")])
async def test_two_engines_of_one_request_give_the_tokens_of_one(
    tmp_path: Path, family: Family, producer: str, consumer: str
) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", family)
    asked = [*cases(), SAMPLED]
    expected = await aggregated(model, asked)
    spec = cluster_file(tmp_path, model, worker("prefill", "prefill", producer), worker("decode", "decode", consumer))
    with local_cluster([str(spec)], tmp_path / "state") as cluster:
        async with client(cluster.url) as http:
            answers = await asyncio.gather(*(complete(http, case) for case in asked))
        for answer, outcome in zip(answers, expected, strict=True):
            assert_same(answer, outcome, tolerance=TOLERANCE)
        assert await crossed(cluster) > 0
        await cluster.until_idle()
        shown = await cluster.metrics("prefill" if producer == "vllm" else "decode")
        assert any(name.startswith("isthmus_engine_steps_total") and value > 0 for name, value in shown.items())
        assert any(name.startswith("vllm:prompt_tokens_total") and value > 0 for name, value in shown.items())


@pytest.mark.parametrize("family", [Family.GPT_OSS, Family.DEEPSEEK_V3])
async def test_two_vllm_workers_of_other_block_sizes_give_the_tokens_of_one(tmp_path: Path, family: Family) -> None:
    """What one worker answers to a prompt alone, it answers after a hand-over: 16 requests at once."""
    model = write_tiny_checkpoint(tmp_path / "model", family)
    blocks = (32, 128) if family is Family.GPT_OSS else (16, 16)
    asked = [Case(prompt_of(40 + 23 * number, seed=number)) for number in range(16)]
    prefill = worker("prefill", "prefill", "vllm", block_size=blocks[0])
    decode = worker("decode", "decode", "vllm", block_size=blocks[1])
    spec = cluster_file(tmp_path, model, prefill, decode)
    with local_cluster([str(spec)], tmp_path / "state") as cluster:
        async with client(cluster.url) as http:
            split = await asyncio.gather(*(complete(http, case) for case in asked))
        assert await crossed(cluster) > 0
        await cluster.until_idle()
    with local_cluster([str(spec), "--mode", "aggregated"], tmp_path / "alone") as cluster:
        async with client(cluster.url) as http:
            alone = [await complete(http, case) for case in asked]
        assert await crossed(cluster) == 0
    for one, other in zip(split, alone, strict=True):
        assert one.error is None
        assert one.token_ids == other.token_ids
        assert max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)) <= TOLERANCE


async def test_clients_that_leave_free_everything(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", Family.LLAMA)
    spec = cluster_file(tmp_path, model, worker("prefill", "prefill", "vllm"), worker("decode", "decode", "vllm"))
    with local_cluster([str(spec)], tmp_path / "state") as cluster:
        async with client(cluster.url) as http:
            streams = [
                asyncio.create_task(_leave_after(http, Case(prompt_of(30 + n, seed=n), max_tokens=1500), n % 4))
                for n in range(8)
            ]
            await asyncio.gather(*streams)
            stays = await complete(http, Case(prompt_of(50, seed=1)))
        assert stays.error is None
        assert len(stays.token_ids) == 24
        await cluster.until_idle()


async def _leave_after(http: httpx.AsyncClient, case: Case, chunks: int) -> None:
    gone = asyncio.Event()
    left = chunks

    async def count() -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            gone.set()

    reading = asyncio.create_task(_read(http, case, count))
    await gone.wait()
    reading.cancel()
    await asyncio.wait([reading])


async def _read(http: httpx.AsyncClient, case: Case, on_tokens: Callable[[], Awaitable[None]]) -> Answer:
    return await stream(http, case, on_tokens)


def test_engine_arguments_that_vllm_does_not_know_are_named(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", Family.LLAMA)
    decode = worker("decode", "decode", "vllm") | {"vllm": {"max_num_sequences": 4}}
    spec = cluster_file(tmp_path, model, worker("prefill", "prefill", "reference"), decode)
    with pytest.raises(AssertionError) as failed, local_cluster([str(spec)], tmp_path / "state"):
        pass
    assert "vLLM has no engine argument 'max_num_sequences'" in str(failed.value)
    assert "did you mean max_num_seqs?" in str(failed.value)
