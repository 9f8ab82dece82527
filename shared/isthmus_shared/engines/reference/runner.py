"""The reference engine's runner: one thread that owns the model and the paged cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from isthmus_shared.engines.config import EngineConfig
from isthmus_shared.engines.port import EngineRequest
from isthmus_shared.engines.reference.fingerprint import model_fingerprint
from isthmus_shared.engines.reference.model import ReferenceModel
from isthmus_shared.engines.reference.model_config import ModelConfig, read_model_config
from isthmus_shared.engines.reference.plan import make_plan
from isthmus_shared.engines.reference.weights import load_weights
from isthmus_shared.engines.runner_port import RunnerInfo, StepResult, WorkResult
from isthmus_shared.engines.sampling import sample
from isthmus_shared.engines.sequence import Batch, Phase, Work
from isthmus_shared.engines.sequence import Sequence as SequenceState
from isthmus_shared.errors import ConfigInvalid, Fault, IsthmusError
from isthmus_shared.ids import RequestId
from isthmus_shared.kv.canonical import CanonicalIndex, KvPart
from isthmus_shared.kv.layout import KvLayout
from isthmus_shared.kv.paged import PagedKv
from isthmus_shared.kv.shape import KvShape, group_layers, scaled
from isthmus_shared.kv.staging import gather_rows, scatter_rows
from isthmus_shared.kv.views import row_shape, scatter_part
from isthmus_shared.messages.work import SamplingParams

WARM_UP_TOKENS = 16


class ReferenceRunner:
    def __init__(self, config: EngineConfig) -> None:
        if config.model_path is None:
            raise ConfigInvalid("the reference engine needs a model folder", param="model_path")
        self._config = config
        self._folder: Path = config.model_path
        self._layout = KvLayout.parse(config.kv_layout)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reference-engine")
        self._model: ReferenceModel
        self._kv: PagedKv
        self._shape: KvShape

    async def start(self) -> RunnerInfo:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._load_model)

    async def execute(self, batch: Batch) -> StepResult:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._timed, batch)

    async def stop(self) -> None:
        self._thread.shutdown(wait=True)

    # -- in the engine's thread -------------------------------------------------------------------------------------

    def _load_model(self) -> RunnerInfo:
        torch.set_num_threads(self._config.threads)
        _use_device(self._config.device)
        config = read_model_config(self._folder)
        groups = group_layers(config.windows, kv_heads=config.kv_heads, head_dim=config.head_dim)
        self._shape = KvShape(
            model_fingerprint=model_fingerprint(self._folder),
            dtype=self._layout.dtype,
            groups=scaled(groups, self._layout.fp8_scale) if self._layout.dtype.is_fp8 else groups,
        )
        block_bytes = self._shape.token_bytes * self._layout.block_tokens
        blocks = self._config.kv_blocks or max(1, self._config.kv_cache_bytes // block_bytes)
        self._kv = PagedKv(
            self._layout, layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim, blocks=blocks
        )
        self._model = ReferenceModel(config, load_weights(self._folder, config))
        self._warm_up()
        return RunnerInfo(
            shape=self._shape,
            layout=self._layout,
            blocks_total=blocks,
            max_model_len_tokens=config.max_position,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
        )

    def _warm_up(self) -> None:
        count = min(WARM_UP_TOKENS, self._layout.block_tokens)
        request = EngineRequest(RequestId("warm-up"), (0,) * count, SamplingParams(max_tokens=1, temperature=0))
        sequence = SequenceState(
            uid=-1, request=request, max_tokens_total=count + 1, tokens=[0] * count, phase=Phase.RUNNING
        )
        work = Work(sequence, (0,) * count, start=0, block_table=(0,), prefill=True, load=False, sample=True)
        self._execute(Batch((work,)))

    def _timed(self, batch: Batch) -> StepResult:
        began_s = time.perf_counter()
        results = self._execute(batch)
        return StepResult(results, time.perf_counter() - began_s)

    def _execute(self, batch: Batch) -> list[WorkResult]:
        faults: dict[int, Fault] = {}
        with torch.inference_mode():
            for work in batch.works:
                if work.load:
                    self._load(work, faults)
            copied = [work for work in batch.works if work.copies]
            for layer in range(self._model.config.layers) if copied else ():
                self._save(layer, copied, faults)
            live = [work for work in batch.works if work.sequence.uid not in faults and not work.copies]
            if not live:
                return [self._outcome(work, faults, {}) for work in batch.works]
            plan = make_plan(live, self._kv, self._model.config.windows)
            logits = self._model.forward(plan, self._kv, lambda layer: self._save(layer, live, faults))
            rows = iter(logits.cpu())
            sampled = {work.sequence.uid: _sample(work, next(rows)) for work in live if work.sample}
        return [self._outcome(work, faults, sampled) for work in batch.works]

    @staticmethod
    def _outcome(work: Work, faults: dict[int, Fault], sampled: dict[int, WorkResult]) -> WorkResult:
        fault = faults.get(work.sequence.uid)
        return sampled.get(work.sequence.uid, WorkResult()) if fault is None else WorkResult(fault=fault)

    def _save(self, layer: int, works: Sequence[Work], faults: dict[int, Fault]) -> None:
        """Gather what this step has added to one layer, canonical, into the sinks."""
        for work in works:
            sequence, sink = work.sequence, work.sequence.sink
            start = sequence.saved  # cached tokens before the step's own are saved with it
            if sink is None or start >= work.end or sequence.uid in faults:
                continue
            index = self._index(sequence.sink_tokens)
            if index.span(layer, KvPart.K, start, work.end) is None:
                continue
            table = torch.tensor(work.block_table, device="cpu")
            try:
                for part, cache in zip(index.parts(layer), self._kv.views[layer].parts, strict=True):
                    place = index.span(layer, part, start, work.end)
                    assert place is not None, "K and V of one layer have the same tokens"
                    memory = sink.map(place.offset_bytes, place.size_bytes)
                    gather_rows(cache, table, place.token_start, place.token_end, memory)
                    self._finish_copies()
                    sink.filled(place.offset_bytes, place.size_bytes)
            except IsthmusError as error:
                faults[sequence.uid] = error.to_fault()

    def _load(self, work: Work, faults: dict[int, Fault]) -> None:
        """Scatter the source's bytes into this cache's layout.

        Tokens that a window hides stay out of the flow; their slots are zeroed, for a former owner's bytes must not
        even be multiplied by zero.
        """
        sequence, source = work.sequence, work.sequence.request.kv_load
        assert source is not None, "it loads"
        index, table = self._index(sequence.request.loaded_tokens), torch.tensor(work.block_table, device="cpu")
        theirs, own = sequence.request.kv_manifest, self._layout.dtype
        flavours = None if theirs is None or not own.is_fp8 else (theirs.dtype, own)
        try:
            for layer in index.layers:
                for part, cache in zip(index.parts(layer), self._kv.views[layer].parts, strict=True):
                    span = index.whole(layer, part)
                    memory = source.map(span.offset_bytes, span.size_bytes)
                    scatter_rows(cache, table, span.token_start, span.token_end, memory, flavours=flavours)
                    if span.token_start:
                        zeros = torch.zeros((span.token_start, *row_shape(cache)), dtype=cache.dtype)
                        scatter_part(cache, table, 0, span.token_start, zeros)
            self._finish_copies()
        except IsthmusError as error:
            faults[sequence.uid] = error.to_fault()

    def _finish_copies(self) -> None:
        """On an accelerator they are only enqueued, and the staging is the relay's right after."""
        if self._config.device != "cpu":
            torch.accelerator.synchronize()

    def _index(self, tokens: int) -> CanonicalIndex:
        return CanonicalIndex(self._shape.manifest(tokens))

    @property
    def model_config(self) -> ModelConfig:
        return self._model.config


def _use_device(name: str) -> None:
    """Of this thread: every tensor that it makes is there, unless it says otherwise."""
    if name == "cpu":
        return  # it is there as it is, and naming it costs every operation some microseconds
    try:
        torch.set_default_device(name)
        torch.zeros(1)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise ConfigInvalid(
            f"the reference engine cannot compute on device {name!r}",
            why=str(error).splitlines()[0],
            todo="name another, or install a build of torch for it",
            param="device",
        ) from error


def _sample(work: Work, logits: Tensor) -> WorkResult:
    sequence = work.sequence
    first_output = sequence.prompt_tokens - sequence.request.output_offset
    token_id, logprob = sample(
        sequence.request.sampling,
        output_index=sequence.next_output_index,
        previous=sequence.tokens[first_output:],
        logits=logits.numpy(),
    )
    return WorkResult(token_id=token_id, logprob=logprob)
