"""The connector's worker halves over two relays, on caches laid out as vLLM's, without vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus_kvrelay.client.vllm.cache import RankCache
from isthmus_kvrelay.client.vllm.jobs import Discard, LoadJob, Origin, SaveJob, StepJobs
from isthmus_kvrelay.client.vllm.loading import Loader
from isthmus_kvrelay.client.vllm.model_layers import LayerSpec
from isthmus_kvrelay.client.vllm.rank import Rank
from isthmus_kvrelay.client.vllm.relay_thread import RelayThread
from isthmus_kvrelay.client.vllm.saving import Saver
from isthmus_kvrelay.client.vllm.stats import TransferStats
from isthmus_shared.kv import form as forms
from isthmus_shared.kv.reshard import heads_of
from isthmus_testing.relay import Node, daemon_settings, running, worker_ref
from isthmus_testing.vllm_parts import FINGERPRINT, cpu_cache, got, layer_specs, load_job, put, save_job, value
from isthmus_testing.waiting import eventually

WAIT_S = 30.0
BLOCKS = 24


@dataclass
class Side:
    """One rank of an engine."""

    node: Node
    specs: tuple[LayerSpec, ...]
    tensors: dict[str, Tensor]
    cache: RankCache
    shared: Rank
    first_head: int
    messages: list[str] = field(default_factory=list)
    parts: list[Saver | Loader] = field(default_factory=list)

    def saver(self) -> Saver:
        saver = Saver(self.shared, self.cache)
        self.parts.append(saver)
        return saver

    def loader(self) -> Loader:
        loader = Loader(self.shared, self.cache)
        self.parts.append(loader)
        return loader

    def fill(self, blocks: Sequence[Sequence[int]], tokens: range) -> None:
        """As the engine computes those tokens: every element another number."""
        for spec, token, head, part in itertools.product(self.specs, tokens, self.heads, range(2)):
            block = blocks[spec.group][token // spec.block_tokens]
            if block:
                row = value(spec.layer_id, part, token, self.first_head + head)
                put(self.tensors[spec.name], spec, block, token % spec.block_tokens, head, part, row)

    def holds(self, blocks: Sequence[Sequence[int]], tokens: range, layers: Sequence[int] | None = None) -> bool:
        """Whether exactly that is where those tokens belong."""
        for spec, token, head, part in itertools.product(self.specs, tokens, self.heads, range(2)):
            if layers is not None and spec.layer_id not in layers:
                continue
            block = blocks[spec.group][token // spec.block_tokens]
            row = got(self.tensors[spec.name], spec, block, token % spec.block_tokens, head, part)
            if not torch.equal(row, value(spec.layer_id, part, token, self.first_head + head)):
                return False
        return True

    @property
    def heads(self) -> range:
        return range(self.specs[0].kv_heads)


@contextlib.asynccontextmanager
async def side(
    node: Node, *, tp: int = 1, rank: int = 0, heads: int = 2, appear_s: float = 0.0, wait_s: float = 5.0, **specs: int
) -> AsyncIterator[Side]:
    mine = heads_of(rank, tp, heads)
    layers = layer_specs(kv_heads=mine.count, **specs)
    tensors = {spec.name: cpu_cache(spec, BLOCKS) for spec in layers}
    messages: list[str] = []
    relay = RelayThread(str(node.daemon.settings.socket), worker_ref(node, f"r{rank}"), messages.append)
    relay.start()
    assert await asyncio.to_thread(relay.wait_attached, WAIT_S)
    cache = RankCache(layers, tensors, lambda _: forms.CPU_ATTN)
    shared = Rank(
        rank=rank,
        tp_size=tp,
        layers=layers,
        kv_heads_total=heads,
        relay=relay,
        stats=TransferStats(scheduler=False),
        log=messages.append,
        staging_wait_s=wait_s,
        appear_s=appear_s,
    )
    made = Side(node, layers, tensors, cache, shared, mine.start, messages)
    try:
        yield made
    finally:
        for part in made.parts:
            await asyncio.to_thread(part.stop)
        await asyncio.to_thread(relay.stop)


@contextlib.asynccontextmanager
async def nodes(folder: Path, **settings: int) -> AsyncIterator[tuple[Node, Node]]:
    async with (
        running(daemon_settings(folder, "a", **settings)) as near,
        running(daemon_settings(folder, "b", **settings)) as far,
    ):
        yield near, far


def step(saver: Saver, *jobs: SaveJob, dropped: Sequence[str] = (), preempted: Sequence[str] = ()) -> None:
    """One step of the engine, with its hooks in vLLM's order."""
    work = StepJobs(FINGERPRINT, saves=jobs, dropped=frozenset(dropped), preempted=frozenset(preempted))
    saver.let_go(work)
    saver.begin_step(work)
    for name in saver._cache.by_name:
        saver.layer_done(name)
    saver.step_done()


async def sent(saver: Saver, *requests: str) -> None:
    """Until the blocks of those finished requests are given back."""
    missing = set(requests)

    def done() -> bool:
        nonlocal missing
        missing -= saver.take_sent(requests)
        return not missing

    await eventually(done)


async def received(loader: Loader, *jobs: LoadJob) -> set[str]:
    """Loads, and says which have failed."""
    loader.begin_step(StepJobs(FINGERPRINT, loads=jobs))
    missing, failed = {job.request_id for job in jobs}, set()

    def done() -> bool:
        nonlocal missing, failed
        come, bad = loader.take()
        missing, failed = missing - come, failed | bad
        return not missing

    await eventually(done)
    return failed


def table(block_tokens: int, tokens: int, *, first: int = 1, stride: int = 1) -> list[int]:
    return [first + stride * index for index in range(-(-tokens // block_tokens))]


@pytest.mark.parametrize(
    ("producer", "consumer", "tokens"),
    [(32, 128, 1), (32, 128, 131), (128, 32, 31), (128, 32, 129), (16, 16, 33), (32, 48, 32)],
)
async def test_every_token_lands_in_its_place_whatever_the_block_sizes(
    tmp_path: Path, producer: int, consumer: int, tokens: int
) -> None:
    async with (
        nodes(tmp_path) as (near, far),
        side(near, block_tokens=producer) as one,
        side(far, block_tokens=consumer) as other,
    ):
        saver, loader = one.saver(), other.loader()
        here, there = [table(producer, tokens, stride=2)], [table(consumer, tokens, first=3, stride=-1 + 2)]
        one.fill(here, range(tokens))
        job = save_job("r", here, computed=tokens, prompt_tokens=tokens)
        step(saver, job)
        assert await received(loader, load_job(job, near.ref, there)) == set()
        assert other.holds(there, range(tokens))
        await sent(saver, "r")
        for spec in other.specs:
            untouched = [block for block in range(BLOCKS) if block not in there[0]]
            assert other.tensors[spec.name][untouched].isnan().all(), "no other block was written"
        await eventually(lambda: near.at_rest() and far.at_rest(), what="staging is given back at both ends")


async def test_chunks_are_sent_as_they_are_computed_and_a_cached_prefix_is_not_written(tmp_path: Path) -> None:
    tokens, blocks = 100, [table(16, 100)]
    async with nodes(tmp_path) as (near, far), side(near) as one, side(far) as other:
        saver, loader = one.saver(), other.loader()
        for start in range(0, tokens, 40):
            end = min(start + 40, tokens)
            one.fill(blocks, range(start, end))
            job = save_job("r", blocks, computed=end, prompt_tokens=tokens)
            step(saver, job)
        there = [table(16, tokens, first=9)]
        assert await received(loader, load_job(job, near.ref, there, start=48)) == set()
        assert other.holds(there, range(48, tokens))
        assert other.tensors[other.specs[0].name][there[0][:3]].isnan().all()


async def test_a_window_carries_what_is_left_of_it(tmp_path: Path) -> None:
    """The last of 100 tokens sees 32: those from 68 on. Blocks before them are null on both sides."""
    tokens = 100
    here = [table(16, tokens), [0] * 4 + [14, 15, 16]]
    there = [table(32, tokens, first=8), [0, 0, 13, 14]]
    async with (
        nodes(tmp_path) as (near, far),
        side(near, window_tokens=32) as one,
        side(far, window_tokens=32, block_tokens=32) as other,
    ):
        saver, loader = one.saver(), other.loader()
        one.fill(here, range(tokens))
        job = save_job("r", here, computed=tokens, prompt_tokens=tokens)
        step(saver, job)
        assert await received(loader, load_job(job, near.ref, there)) == set()
        assert other.holds(there, range(tokens), layers=[0])
        assert other.holds(there, range(68, tokens), layers=[1])
        assert other.tensors[other.specs[1].name][0].isnan().all(), "the null block stays as it is"


@pytest.mark.parametrize(("producer", "consumer"), [(1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (4, 2), (8, 2), (2, 8)])
async def test_heads_find_their_ranks(tmp_path: Path, producer: int, consumer: int) -> None:
    tokens, blocks = 40, [table(16, 40)]
    async with contextlib.AsyncExitStack() as stack:
        near, far = await stack.enter_async_context(nodes(tmp_path, total_slots=256))
        ones = [await stack.enter_async_context(side(near, tp=producer, rank=r, heads=4)) for r in range(producer)]
        others = [await stack.enter_async_context(side(far, tp=consumer, rank=r, heads=4)) for r in range(consumer)]
        savers = [one.saver() for one in ones]
        loaders = [other.loader() for other in others]
        job = save_job("r", blocks, computed=tokens, prompt_tokens=tokens, producer_tp=producer, consumer_tp=consumer)
        for one, saver in zip(ones, savers, strict=True):
            one.fill(blocks, range(tokens))
            step(saver, job)
        load = load_job(job, near.ref, blocks)
        for other, loader in zip(others, loaders, strict=True):
            assert await received(loader, load) == set()
            assert other.holds(blocks, range(tokens))
        for saver in savers:
            await sent(saver, "r")


async def test_sixteen_transfers_at_once(tmp_path: Path) -> None:
    async with nodes(tmp_path, total_slots=256) as (near, far), side(near) as one, side(far) as other:
        saver, loader = one.saver(), other.loader()
        jobs = [save_job(f"r{i}", [[1 + i, 17]], computed=9 + i, prompt_tokens=9 + i) for i in range(8)]
        for job in jobs:
            one.fill(job.blocks, range(job.computed))
        step(saver, *jobs)
        loads = [load_job(job, near.ref, job.blocks) for job in jobs]
        assert await received(loader, *loads) == set()
        for load in loads:
            assert other.holds(load.blocks, range(load.end))
        await sent(saver, *(job.request_id for job in jobs))


async def test_a_dropped_transfer_gives_its_blocks_and_staging_back_and_fails_at_the_other_end(tmp_path: Path) -> None:
    async with nodes(tmp_path) as (near, far), side(near) as one, side(far) as other:
        saver, loader = one.saver(), other.loader()
        job = save_job("r", [table(16, 100)], computed=40, prompt_tokens=100)
        step(saver, job)
        loader.begin_step(StepJobs(FINGERPRINT, loads=(load_job(job, near.ref, [table(16, 100)]),)))
        step(saver, dropped=["r"])
        await sent(saver, "r")
        results: list[tuple[set[str], set[str]]] = []
        await eventually(lambda: bool(results.append(loader.take()) or results[-1][0]))
        assert results[-1] == ({"r"}, {"r"})
        await eventually(lambda: near.at_rest() and far.at_rest())
        assert any("not loaded" in message for message in other.messages)


async def test_a_preempted_request_is_saved_again_from_blocks_that_are_its_own(tmp_path: Path) -> None:
    tokens, old, new = 60, [[1, 2, 3, 4]], [[5, 6, 7, 8]]
    async with nodes(tmp_path) as (near, far), side(near) as one, side(far) as other:
        saver, loader = one.saver(), other.loader()
        one.fill(old, range(20))
        step(saver, save_job("r", old, computed=20, prompt_tokens=tokens))
        saver.let_go(StepJobs(FINGERPRINT, preempted=frozenset(["r"])))
        for tensor in one.tensors.values():
            tensor[1:5] = -1.0  # another request's from here on
        one.fill(new, range(tokens))
        job = save_job("r", new, computed=tokens, prompt_tokens=tokens)
        step(saver, job)
        assert await received(loader, load_job(job, near.ref, old)) == set()
        assert other.holds(old, range(tokens))


async def test_blocks_are_let_go_of_only_when_the_copier_has_left_them(tmp_path: Path) -> None:
    blocks = [table(16, 60)]
    async with nodes(tmp_path) as (near, _), side(near) as one:
        saver, entered, leave = one.saver(), threading.Event(), threading.Event()
        save = one.cache.save

        def slow(*arguments: Any) -> list[tuple[int, int]]:
            entered.set()
            assert leave.wait(WAIT_S)
            return save(*arguments)

        one.cache.save = slow  # type: ignore[method-assign]
        one.fill(blocks, range(60))
        step(saver, save_job("r", blocks, computed=60, prompt_tokens=60))
        assert await asyncio.to_thread(entered.wait, WAIT_S)
        letting = asyncio.create_task(
            asyncio.to_thread(saver.let_go, StepJobs(FINGERPRINT, preempted=frozenset(["r"])))
        )
        done, _ = await asyncio.wait([letting], timeout=0.05)
        assert not done, "the copier still reads those blocks"
        leave.set()
        await letting


async def test_without_staging_the_blocks_come_back_and_the_load_fails(tmp_path: Path) -> None:
    async with nodes(tmp_path, total_slots=8) as (near, far), side(near, wait_s=0.1) as one, side(far) as other:
        saver, loader = one.saver(), other.loader()
        jobs = [save_job(f"r{i}", [table(16, 100)], computed=100, prompt_tokens=100) for i in range(2)]
        one.fill(jobs[0].blocks, range(100))
        step(saver, *jobs)
        await sent(saver, "r0", "r1")
        assert one.shared.stats.totals == {"saves_failed": 2}
        assert await received(loader, load_job(jobs[1], near.ref, jobs[1].blocks)) == {"r1"}


async def test_a_lost_relay_fails_what_was_crossing_and_is_found_again(tmp_path: Path) -> None:
    async with running(daemon_settings(tmp_path, "b")) as far, side(far) as other:
        loader = other.loader()
        async with running(daemon_settings(tmp_path, "a")) as near, side(near) as one:
            saver = one.saver()
            job = save_job("r", [table(16, 40)], computed=10, prompt_tokens=40)
            step(saver, job)
            load = load_job(job, near.ref, job.blocks)
            loader.begin_step(StepJobs(FINGERPRINT, loads=(load,)))
            await near.daemon.stop()
            step(saver, save_job("r", [table(16, 40)], computed=40, prompt_tokens=40))
            await sent(saver, "r")
            results: list[tuple[set[str], set[str]]] = []
            await eventually(lambda: bool(results.append(loader.take()) or results[-1][0]))
            assert results[-1][1] == {"r"}
            async with running(daemon_settings(tmp_path, "a")) as again:
                await eventually(lambda: one.shared.relay.relay == again.ref)
                one.fill(job.blocks, range(40))
                job = save_job("s", job.blocks, computed=40, prompt_tokens=40)
                step(saver, job)
                assert await received(loader, load_job(job, again.ref, job.blocks)) == set()
                assert other.holds(job.blocks, range(40))


async def test_a_transfer_that_is_asked_for_first_is_waited_for(tmp_path: Path) -> None:
    async with nodes(tmp_path) as (near, far), side(near) as one, side(far, appear_s=WAIT_S) as other:
        saver, loader = one.saver(), other.loader()
        job = save_job("r", [table(16, 40)], computed=40, prompt_tokens=40)
        one.fill(job.blocks, range(40))
        loading = asyncio.create_task(received(loader, load_job(job, near.ref, job.blocks)))
        await eventually(lambda: len(far.closed) > 1)
        step(saver, job)
        assert await loading == set()
        assert other.holds(job.blocks, range(40))


async def test_a_cancelled_load_ends_and_writes_no_more(tmp_path: Path) -> None:
    async with nodes(tmp_path) as (near, far), side(near) as one, side(far) as other:
        saver, loader = one.saver(), other.loader()
        job = save_job("r", [table(16, 40)], computed=20, prompt_tokens=40)
        step(saver, job)
        loader.begin_step(StepJobs(FINGERPRINT, loads=(load_job(job, near.ref, job.blocks),)))
        loader.begin_step(StepJobs(FINGERPRINT, cancelled=frozenset(["r", "stranger"])))
        await eventually(lambda: "r" in loader.take()[0])
        assert loader.in_flight == 0
        step(saver, dropped=["r"])
        await sent(saver, "r")
        await eventually(lambda: near.at_rest() and far.at_rest())


async def test_a_refused_load_fails_without_a_word_to_the_relay(tmp_path: Path) -> None:
    async with nodes(tmp_path) as (near, far), side(far) as other:
        loader = other.loader()
        job = save_job("r", [table(16, 40)], computed=40, prompt_tokens=40)
        load = load_job(job, near.ref, job.blocks)
        refused = LoadJob(load.request_id, load.flow, load.origin, load.blocks, 0, 40, 60.0, refusal="another model")
        assert await received(loader, refused) == {"r"}
        assert any("another model" in message for message in other.messages)


async def test_a_discarded_transfer_frees_its_staging(tmp_path: Path) -> None:
    async with nodes(tmp_path) as (near, far), side(near) as one, side(far) as other:
        saver, loader = one.saver(), other.loader()
        job = save_job("r", [table(16, 40)], computed=40, prompt_tokens=40)
        step(saver, job)
        await sent(saver, "r")
        assert not near.at_rest()
        origin = Origin(near.ref.node_id, near.ref.incarnation, near.ref.address, 1)
        loader.begin_step(StepJobs(FINGERPRINT, discarded=(Discard(job.flow, origin),)))
        await eventually(near.at_rest)
