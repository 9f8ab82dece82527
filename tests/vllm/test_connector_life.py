"""What may happen to a transfer between two vLLM engines, and what must not."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from isthmus_testing.relay import Node, daemon_settings, running
from isthmus_testing.tiny_checkpoints import Family, write_tiny_checkpoint
from isthmus_testing.vllm_engines import (
    MIB,
    TOKENS,
    Engine,
    EngineHost,
    arguments,
    assert_same,
    at_rest,
    connected,
    engine_host,
    prompt_of,
    vllm_missing,
)
from isthmus_testing.waiting import eventually

pytestmark = [
    pytest.mark.skipif(vllm_missing() is not None, reason=str(vllm_missing())),
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

PREFILL = {"do_remote_decode": True}


@dataclass(frozen=True)
class World:
    host: EngineHost
    model: Path
    near: Node
    far: Node
    prefill: Engine
    decode: Engine
    whole: Engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("vllm")
    model = write_tiny_checkpoint(folder / "llama", Family.LLAMA)
    near_settings, far_settings = (daemon_settings(folder, name, total_slots=64, slot_bytes=MIB) for name in ("a", "b"))
    async with running(near_settings) as near, running(far_settings) as far, engine_host(folder) as host:
        one, other = (node.daemon.settings.socket for node in (near, far))
        yield World(
            host,
            model,
            near,
            far,
            await host.engine(**arguments(model, kv_transfer_config=connected("kv_producer", one))),
            await host.engine(
                core=1, **arguments(model, kv_transfer_config=connected("kv_consumer", other, appear_s=60))
            ),
            await host.engine(**arguments(model)),
        )


async def prefilled(world: World, prompt: list[int], **params: Any) -> dict[str, Any]:
    first = await world.prefill.generate(prompt, 1, {**PREFILL, **params})
    assert first.kv_transfer_params is not None
    return first.kv_transfer_params


async def test_kv_of_another_prompt_changes_the_tokens(world: World) -> None:
    """So equal tokens elsewhere mean that the KV was used."""
    prompt, other = prompt_of(200, 1), prompt_of(200, 2)
    found = await world.decode.generate(prompt, TOKENS, await prefilled(world, other))
    assert found.token_ids != (await world.whole.generate(prompt, TOKENS)).token_ids


async def test_decode_may_ask_before_the_prefill_has_begun(world: World) -> None:
    prompt = prompt_of(150, 3)
    params = copy.deepcopy(await prefilled(world, prompt))
    params["ticket"]["transfer_id"] = "xfer-later"
    decoding = asyncio.create_task(world.decode.generate(prompt, TOKENS, params))
    await eventually(lambda: any(one.key.transfer_id == "xfer-later" for one in world.far.closed), 60)
    await prefilled(world, prompt, transfer_id="xfer-later")
    assert_same(await decoding, await world.whole.generate(prompt, TOKENS))


async def test_the_prefill_engine_may_go_on_by_itself(world: World) -> None:
    prompt = prompt_of(150, 4)
    expected = await world.whole.generate(prompt, TOKENS)
    first = await world.prefill.generate(prompt, TOKENS, PREFILL)
    assert_same(first, expected)
    assert first.kv_transfer_params is not None
    assert_same(await world.decode.generate(prompt, TOKENS, first.kv_transfer_params), expected)


async def test_an_abort_while_it_loads_gives_everything_back(world: World) -> None:
    before = (await at_rest(world.decode))["free_blocks"]
    params = copy.deepcopy(await prefilled(world, prompt_of(100, 5)))
    params["ticket"]["transfer_id"] = "xfer-never"
    decoding = asyncio.create_task(world.decode.generate(prompt_of(100, 5), TOKENS, params, key="gone"))
    await eventually(lambda: any(one.key.transfer_id == "xfer-never" for one in world.far.closed), 60)
    await world.decode.abort("gone")
    with pytest.raises(RuntimeError, match="aborted"):
        await decoding
    assert (await at_rest(world.decode))["free_blocks"] == before


async def test_a_failed_load_is_computed_here(world: World) -> None:
    prompt = prompt_of(120, 6)
    params = copy.deepcopy(await prefilled(world, prompt))
    params["ticket"]["source"] |= {"address": "127.0.0.1:1", "incarnation": "gone"}
    before = (await world.decode.state())["totals"].get("loads_failed", 0)
    assert_same(await world.decode.generate(prompt, TOKENS, params), await world.whole.generate(prompt, TOKENS))
    assert (await world.decode.state())["totals"]["loads_failed"] == before + 1


@pytest.mark.parametrize("field", ["model_fingerprint", "dtype", "prompt_tokens"])
async def test_kv_of_another_model_is_not_loaded(world: World, field: str) -> None:
    prompt = prompt_of(120, 7)
    params = copy.deepcopy(await prefilled(world, prompt))
    params["ticket"]["manifest"][field] = {"model_fingerprint": "0" * 64, "dtype": "fp16", "prompt_tokens": 121}[field]
    before = (await world.decode.state())["totals"].get("loads_failed", 0)
    assert_same(await world.decode.generate(prompt, TOKENS, params), await world.whole.generate(prompt, TOKENS))
    assert (await world.decode.state())["totals"]["loads_failed"] == before + 1


async def test_bad_parameters_do_not_end_the_engine(world: World) -> None:
    prompt = prompt_of(60, 8)
    expected = await world.whole.generate(prompt, TOKENS)
    for params in ({"do_remote_prefill": True}, {"do_remote_prefill": True, "ticket": []}, {"do_remote_decode": [1]}):
        assert_same(await world.decode.generate(prompt, TOKENS, params), expected)


async def test_an_abort_during_the_prefill_gives_staging_back(world: World) -> None:
    await at_rest(world.prefill)
    prefilling = asyncio.create_task(
        world.prefill.generate(prompt_of(1000, 9), 1, {**PREFILL, "transfer_id": "xfer-cut"}, key="cut")
    )
    await eventually(lambda: world.near.daemon.stats().flows_out > 0, 60)
    await world.prefill.abort("cut")
    result = await asyncio.gather(prefilling, return_exceptions=True)
    await at_rest(world.prefill)
    if isinstance(result[0], RuntimeError):
        await eventually(lambda: any(one.key.transfer_id == "xfer-cut" for one in world.near.closed), 60)


async def test_with_the_policy_fail_a_failed_load_ends_the_request(world: World) -> None:
    settings = connected("kv_consumer", world.far.daemon.settings.socket, policy="fail", appear_s=0)
    strict = await world.host.engine(core=1, **arguments(world.model, kv_transfer_config=settings))
    prompt = prompt_of(120, 10)
    params = copy.deepcopy(await prefilled(world, prompt))
    params["ticket"]["transfer_id"] = "xfer-nobody"
    assert (await strict.generate(prompt, TOKENS, params)).finish == "error"
    assert (await at_rest(strict))["requests"] == 0
    await strict.close()


async def test_preempted_on_both_sides_the_tokens_stay(world: World) -> None:
    """Engines with room for a third of what they are asked for."""
    tight = {"kv_cache_memory_bytes": 5 * MIB, "block_size": 32, "enable_prefix_caching": False}
    one, other = (node.daemon.settings.socket for node in (world.near, world.far))
    prefill = await world.host.engine(
        **arguments(world.model, kv_transfer_config=connected("kv_producer", one), **tight)
    )
    decode = await world.host.engine(
        core=1, **arguments(world.model, kv_transfer_config=connected("kv_consumer", other), **tight)
    )
    prompts = [prompt_of(60 + 31 * index, 11) for index in range(12)]
    expected = await asyncio.gather(*(world.whole.generate(prompt, 200) for prompt in prompts))

    async def both(prompt: list[int]) -> Any:
        first = await prefill.generate(prompt, 100, PREFILL)
        return await decode.generate(prompt, 200, first.kv_transfer_params)

    found = await asyncio.gather(*(both(prompt) for prompt in prompts))
    for answer, wanted in zip(found, expected, strict=True):
        assert_same(answer, wanted)
    states = [await at_rest(engine) for engine in (prefill, decode)]
    assert all(state["preemptions"] > 0 for state in states)
    assert states[0]["totals"] == {"saved": 12}
    for engine in (prefill, decode):
        await engine.close()
