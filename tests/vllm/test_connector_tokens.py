"""Prefill in one vLLM, decode in another, KV through two relays over TCP: the tokens of one vLLM that does both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from isthmus_testing.relay import daemon_settings, running
from isthmus_testing.tiny_checkpoints import Family, write_tiny_checkpoint
from isthmus_testing.vllm_engines import Answer, Engine, connected, engine_host, vllm_missing

pytestmark = [
    pytest.mark.skipif(vllm_missing() is not None, reason=str(vllm_missing())),
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

TOKENS = 24
LOGPROB_TOLERANCE = 1e-3
MIB = 1 << 20


@dataclass(frozen=True)
class Trio:
    prefill: Engine
    decode: Engine
    whole: Engine
    prefill_block: int
    decode_block: int


def arguments(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 1024,
        "enforce_eager": True,
        "seed": 0,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 48 * MIB,
        "disable_log_stats": True,
        **more,
    }


CASES = {
    "llama": (Family.LLAMA, {"block_size": 32}, {"block_size": 32}),
    "llama, 32 to 128": (Family.LLAMA, {"block_size": 32}, {"block_size": 128}),
    "llama, 128 to 32": (Family.LLAMA, {"block_size": 128}, {"block_size": 32}),
    "qwen3": (Family.QWEN3, {"block_size": 32}, {"block_size": 64}),
    "gpt-oss": (Family.GPT_OSS, {"block_size": 32}, {"block_size": 32}),
    "deepseek-v3": (Family.DEEPSEEK_V3, {"max_num_batched_tokens": 1024}, {"max_num_batched_tokens": 1024}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(CASES))
async def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trio]:
    family, prefill, decode = CASES[request.param]
    folder = tmp_path_factory.mktemp("vllm")
    model = write_tiny_checkpoint(folder / family.value, family)
    relays = [daemon_settings(folder, name, total_slots=64, slot_bytes=MIB) for name in ("a", "b")]
    async with running(relays[0]) as near, running(relays[1]) as far, engine_host(folder) as host:
        sockets = [node.daemon.settings.socket for node in (near, far)]
        yield Trio(
            await host.engine(
                core=0, kv_transfer_config=connected("kv_producer", sockets[0]), **{**arguments(model), **prefill}
            ),
            await host.engine(
                core=1, kv_transfer_config=connected("kv_consumer", sockets[1]), **{**arguments(model), **decode}
            ),
            await host.engine(core=0, **{**arguments(model), **prefill}),
            prefill.get("block_size", 16),
            decode.get("block_size", 16),
        )


def prompt_of(tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed * 7919 + tokens)
    return [draw.randrange(10, 250) for _ in range(tokens)]


async def crossed(trio: Trio, prompt: Sequence[int]) -> Answer:
    first = await trio.prefill.generate(prompt, 1, {"do_remote_decode": True})
    assert first.kv_transfer_params is not None
    return await trio.decode.generate(prompt, TOKENS, first.kv_transfer_params)


def assert_same(found: Answer, expected: Answer) -> None:
    assert found.token_ids == expected.token_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)


async def test_every_length_of_prompt_gives_the_whole_engines_tokens(trio: Trio) -> None:
    block = trio.decode_block
    for tokens in (1, 2, block - 1, block, block + 1, 3 * 256 + 5):
        prompt = prompt_of(tokens, 1)
        assert_same(await crossed(trio, prompt), await trio.whole.generate(prompt, TOKENS))
    assert (await trio.decode.state())["totals"] == {"loaded": 6}, "the tokens came from KV that was carried"


async def test_sixteen_at_once(trio: Trio) -> None:
    prompts = [prompt_of(20 + 17 * index, 2) for index in range(16)]
    expected = await asyncio.gather(*(trio.whole.generate(prompt, TOKENS) for prompt in prompts))
    found = await asyncio.gather(*(crossed(trio, prompt) for prompt in prompts))
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


async def test_a_cached_prefix_is_kept_and_the_rest_loaded(trio: Trio) -> None:
    shared = prompt_of(300, 3)
    for tail in range(3):
        prompt = shared + prompt_of(40, 10 + tail)
        assert_same(await crossed(trio, prompt), await trio.whole.generate(prompt, TOKENS))


async def test_nothing_is_held_when_all_is_over(trio: Trio) -> None:
    for engine in (trio.prefill, trio.decode):
        async with asyncio.timeout(60):
            while (await engine.state())["requests"]:
                pass
