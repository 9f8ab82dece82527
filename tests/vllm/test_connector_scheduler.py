"""The connector in vLLM's own scheduler, without a model runner."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import pytest

from isthmus_kvrelay.client.vllm.jobs import StepJobs
from isthmus_testing.relay import Node, daemon_settings, running
from isthmus_testing.tiny_checkpoints import Family, write_tiny_checkpoint
from isthmus_testing.vllm_engines import connected, vllm_missing

pytestmark = [
    pytest.mark.skipif(vllm_missing() is not None, reason=str(vllm_missing())),
    pytest.mark.timeout(900),
    # vLLM's own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

BLOCK = 16
BLOCKS = 200


class Engine:
    """A real scheduler; steps are computed by saying that they were."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.free = self.free_blocks

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, name: str, tokens: int, params: dict[str, Any], *, max_tokens: int = 4) -> Any:
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, extra_args={"kv_transfer_params": params}
        )
        request = Request(
            request_id=name,
            prompt_token_ids=list(range(10, 10 + tokens)),
            sampling_params=sampling,
            pooling_params=None,
            mm_features=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.scheduler.add_request(request)
        return request

    def step(self, *, sampled: Collection[str] = (), **connector: set[str]) -> tuple[StepJobs, Any, list[Any]]:
        """What the workers are told, what is computed, and the outputs when they have answered that."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=[[5] if name in sampled else [] for name in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=KVConnectorOutput(**connector) if connector else None,
        )
        outputs = self.scheduler.update_from_output(output, result)
        jobs: StepJobs = output.kv_connector_metadata.jobs
        return jobs, output, [one for batch in outputs.values() for one in batch.outputs]


def build(model: Path, node: Node, role: str, *, hybrid: bool, policy: str = "recompute") -> Engine:
    import torch
    from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.structured_output import StructuredOutputManager

    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.kv_cache_layout = "LBHNC"
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", seed=0),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=1024,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=KVTransferConfig(**connected(role, node.daemon.settings.socket, policy=policy)),
    )
    cache.block_size, cache.num_gpu_blocks = BLOCK, BLOCKS
    heads = config.model_config.get_total_num_kv_heads()
    shape = {"block_size": BLOCK, "num_kv_heads": heads, "head_size": 32, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["model.layers.0.attn"], FullAttentionSpec(**shape))]
    if hybrid:
        groups.append(KVCacheGroupSpec(["model.layers.1.attn"], SlidingWindowSpec(**shape, sliding_window=32)))
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
        log_stats=True,
        block_size=BLOCK,
        structured_output_manager=StructuredOutputManager(config),
    )
    return Engine(scheduler)


@contextlib.asynccontextmanager
async def engines(folder: Path, *, hybrid: bool, policy: str = "recompute") -> AsyncIterator[tuple[Engine, Engine]]:
    """A producer and a consumer at one relay. In threads: the connector waits for the relay, which is on this loop."""
    model = await asyncio.to_thread(write_tiny_checkpoint, folder / "llama", Family.LLAMA)
    async with running(daemon_settings(folder, "a")) as node:
        found = [
            await asyncio.to_thread(build, model, node, role, hybrid=hybrid, policy=policy)
            for role in ("kv_producer", "kv_consumer")
        ]
        try:
            yield found[0], found[1]
        finally:
            for engine in found:
                await asyncio.to_thread(engine.scheduler.shutdown)


@pytest.fixture(params=[False, True], ids=["one group", "with a window"])
def hybrid(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def prefilled(engine: Engine, tokens: int) -> tuple[list[int], dict[str, Any]]:
    """Tokens computed after each step that saved, and the ticket."""
    engine.add("p", tokens, {"do_remote_decode": True}, max_tokens=1)
    computed: list[int] = []
    while True:
        last = (bool(computed) and computed[-1] + 64 >= tokens) or tokens <= 64
        jobs, _, outputs = engine.step(sampled=["p"] if last else ())
        computed += [job.computed for job in jobs.saves]
        if outputs and outputs[0].finish_reason is not None:
            return computed, outputs[0].kv_transfer_params


async def test_a_prefill_is_saved_in_chunks_and_its_blocks_are_held_until_sent(tmp_path: Path, hybrid: bool) -> None:
    async with engines(tmp_path, hybrid=hybrid) as (producer, _):
        computed, params = prefilled(producer, 150)
        assert computed == [64, 128, 150]
        assert params["ticket"]["manifest"]["prompt_tokens"] == 150
        assert producer.free_blocks < producer.free
        assert producer.scheduler.has_requests(), "the engine goes on stepping"
        producer.step()
        assert producer.free_blocks < producer.free
        producer.step(finished_sending={"p"})
        assert producer.free_blocks == producer.free
        assert not producer.scheduler.requests


async def test_a_window_that_slides_on_gives_its_blocks_back_only_when_they_are_sent(tmp_path: Path) -> None:
    async with engines(tmp_path, hybrid=True) as (producer, _):
        producer.add("p", 47, {"do_remote_decode": True}, max_tokens=200)
        jobs, _, _ = producer.step(sampled=["p"])
        # Token 46 sees 15 to 46: all three blocks of the window's group. By token 111 they have left the window.
        window = set(jobs.saves[0].blocks[1])
        assert len(window) == 3
        for _ in range(100):
            producer.step(sampled=["p"])
        pool = producer.scheduler.kv_cache_manager.block_pool
        assert all(pool.blocks[block].ref_cnt == 1 for block in window)
        producer.scheduler.finish_requests("p", _aborted())
        producer.step(finished_sending={"p"})
        assert producer.free_blocks == producer.free


async def test_a_load_waits_then_computes_the_last_token_only(tmp_path: Path, hybrid: bool) -> None:
    async with engines(tmp_path, hybrid=hybrid) as (producer, consumer):
        _, params = prefilled(producer, 150)
        request = consumer.add("d", 150, params)
        jobs, output, _ = consumer.step()
        assert output.total_num_scheduled_tokens == 0
        (load,) = jobs.loads
        assert (load.start, load.end, load.refusal) == (0, 150, None)
        assert [len(table) for table in load.blocks] == [10] * (1 + hybrid)
        assert not consumer.step(finished_recving={"d"})[0].loads, "asked for once"
        _, output, _ = consumer.step(sampled=["d"])
        assert output.num_scheduled_tokens == {"d": 1}
        assert output.scheduled_new_reqs[0].num_computed_tokens == 149
        assert request.num_output_tokens == 1


async def test_a_prefix_that_is_here_is_not_loaded(tmp_path: Path) -> None:
    async with engines(tmp_path, hybrid=False) as (producer, consumer):
        _, params = prefilled(producer, 150)
        for name in ("d", "e"):
            consumer.add(name, 150, params)
            jobs, _, _ = consumer.step()
            assert jobs.loads[0].start == (0 if name == "d" else 144)
            consumer.step(finished_recving={name})
            consumer.step(sampled=[name])
            consumer.scheduler.finish_requests(name, _aborted())


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_a_failed_load_is_computed_or_fails_by_policy(tmp_path: Path, hybrid: bool, policy: str) -> None:
    async with engines(tmp_path, hybrid=hybrid, policy=policy) as (producer, consumer):
        _, params = prefilled(producer, 150)
        consumer.add("d", 150, params)
        consumer.step()
        _, _, outputs = consumer.step(finished_recving={"d"}, failed_recving={"d"})
        if policy == "fail":
            assert str(outputs[0].finish_reason) == "error"
            consumer.step()
            assert consumer.free_blocks == consumer.free
            return
        jobs, output, _ = consumer.step()
        assert output.num_scheduled_tokens == {"d": 64}
        assert output.scheduled_new_reqs[0].num_computed_tokens == 0
        assert not jobs.loads


async def test_aborts_on_both_sides_give_the_blocks_back(tmp_path: Path, hybrid: bool) -> None:
    async with engines(tmp_path, hybrid=hybrid) as (producer, consumer):
        _, params = prefilled(producer, 150)
        producer.step(finished_sending={"p"})
        producer.add("q", 150, {"do_remote_decode": True})
        producer.step()
        producer.scheduler.finish_requests("q", _aborted())
        assert producer.step()[0].dropped == {"q"}
        producer.step(finished_sending={"q"})
        assert producer.free_blocks == producer.free
        consumer.add("d", 150, params)
        consumer.step()
        consumer.scheduler.finish_requests("d", _aborted())
        assert consumer.step()[0].cancelled == {"d"}
        assert consumer.free_blocks < consumer.free
        consumer.step(finished_recving={"d"}, failed_recving={"d"})
        assert consumer.free_blocks == consumer.free


async def test_an_engine_without_a_relay_starts_and_hands_nothing_over(tmp_path: Path) -> None:
    async with engines(tmp_path, hybrid=False) as (producer, _):
        relay = producer.scheduler.connector._scheduler._relay
        await asyncio.to_thread(relay.stop)
        _, params = prefilled(producer, 40)
        assert params is None
        assert producer.step()[0].dropped == {"p"}


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED
