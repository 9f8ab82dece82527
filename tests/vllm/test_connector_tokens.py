"""Prefill in one vLLM, decode in another, KV through two relays over TCP: the tokens of one vLLM that does both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest
import pytest_asyncio

from isthmus_testing.relay import daemon_settings, running
from isthmus_testing.tiny_checkpoints import Family, write_tiny_checkpoint
from isthmus_testing.vllm_engines import (
    MIB,
    TOKENS,
    Answer,
    Engine,
    arguments,
    assert_same,
    at_rest,
    connected,
    crossing,
    engine_host,
    prompt_of,
    vllm_missing,
)

pytestmark = [
    pytest.mark.skipif(vllm_missing() is not None, reason=str(vllm_missing())),
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]


@dataclass(frozen=True)
class Trio:
    prefill: Engine
    decode: Engine
    whole: Engine
    decode_block: int
    free_blocks: tuple[int, int]


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
        engines = [
            await host.engine(**arguments(model, kv_transfer_config=connected("kv_producer", sockets[0]), **prefill)),
            await host.engine(
                core=1, **arguments(model, kv_transfer_config=connected("kv_consumer", sockets[1]), **decode)
            ),
            await host.engine(**arguments(model, **prefill)),
        ]
        free = [(await engine.state())["free_blocks"] for engine in engines]
        yield Trio(*engines, decode.get("block_size", 16), (free[0], free[1]))


async def crossed(trio: Trio, prompt: Sequence[int]) -> Answer:
    return await crossing(trio.prefill, trio.decode, prompt)


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
    for engine, free in zip((trio.prefill, trio.decode), trio.free_blocks, strict=True):
        state = await at_rest(engine)
        assert state["free_blocks"] == free
