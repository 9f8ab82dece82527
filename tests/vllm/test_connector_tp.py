"""Engines of one and of two tensor-parallel ranks, each rank a process with a relay client of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus_testing.relay import daemon_settings, running
from isthmus_testing.tiny_checkpoints import Family, write_tiny_checkpoint
from isthmus_testing.vllm_engines import (
    MIB,
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
]

TWO = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}


@pytest.mark.parametrize("family", [Family.LLAMA, Family.DEEPSEEK_V3])
@pytest.mark.parametrize(("producer", "consumer"), [(2, 1), (1, 2)])
async def test_heads_are_sharded_anew(tmp_path: Path, family: Family, producer: int, consumer: int) -> None:
    model = write_tiny_checkpoint(tmp_path / family.value, family)
    more = {"max_num_batched_tokens": 1024} if family is Family.DEEPSEEK_V3 else {}
    near_settings, far_settings = (
        daemon_settings(tmp_path, name, total_slots=64, slot_bytes=MIB) for name in ("a", "b")
    )
    async with running(near_settings) as near, running(far_settings) as far, engine_host(tmp_path) as host:
        one, other = (node.daemon.settings.socket for node in (near, far))
        prefill = await host.engine(
            environ=TWO if producer > 1 else {},
            **arguments(
                model,
                kv_transfer_config=connected("kv_producer", one, peer_tp_size=consumer),
                tensor_parallel_size=producer,
                **more,
            ),
        )
        decode = await host.engine(
            environ=TWO if consumer > 1 else {},
            **arguments(
                model,
                kv_transfer_config=connected("kv_consumer", other, policy="fail"),
                tensor_parallel_size=consumer,
                **more,
            ),
        )
        whole = await host.engine(**arguments(model, **more))
        for tokens in (1, 31, 300):
            prompt = prompt_of(tokens, 1)
            assert_same(await crossing(prefill, decode, prompt), await whole.generate(prompt, 24))
        for engine in (prefill, decode):
            await at_rest(engine)
        # A latent is the same on every rank of the producer, and sent by one of them to each of the consumer's.
        flows = consumer if family is Family.DEEPSEEK_V3 else max(producer, consumer)
        assert far.daemon.stats().delivered_in == 3 * flows
