"""A runner without arithmetic: steps take the time that `SimCosts` gives, tokens are a hash, KV bytes a pattern.

The pattern of a token's K or V row follows from (model fingerprint, layer, K or V, token id, position), so whoever
receives KV checks every byte against its own prompt: bytes of another prompt, another generation or another place
never pass. The engine's own cache holds token ids: before a prompt's first token every place that it claims is compared
with the prompt, so that a block of another prefix never passes either.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from isthmus_shared.engines.config import EngineConfig, SimCosts
from isthmus_shared.engines.runner_port import RunnerInfo, StepResult, WorkResult
from isthmus_shared.engines.sequence import Batch, Work
from isthmus_shared.engines.sequence import Sequence as SequenceState
from isthmus_shared.engines.transfer import read_span, write_span
from isthmus_shared.errors import IsthmusError, TransferFailed
from isthmus_shared.kv.canonical import CanonicalIndex, KvPart
from isthmus_shared.kv.layout import KvLayout
from isthmus_shared.kv.shape import KvShape, group_layers
from isthmus_shared.messages.work import TokenLogprob

SIM_WINDOWS: tuple[int | None, ...] = (None, 128, None, 128)
SIM_KV_HEADS = 2
SIM_HEAD_DIM = 16
SIM_VOCAB_SIZE = 1 << 20
"""Any tokenizer's ids are accepted in prompts; output is printable ASCII (a byte-level tokenizer's first 256 ids)."""
SIM_EOS_TOKEN_ID = 257
_FIRST_PRINTABLE, _PRINTABLES = 32, 95

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]


class StepCosts(Protocol):
    def batch_s(self, batch: Batch) -> float:
        """Seconds that a step with that work takes."""
        ...


class SimRunner:
    """`costs`: in place of the configuration's."""

    def __init__(self, config: EngineConfig, *, costs: StepCosts | None = None) -> None:
        self._config = config
        self._costs = costs or _Linear(config.sim.costs)
        self._layout = KvLayout.parse(config.kv_layout)
        fingerprint = hashlib.sha256(f"sim:{config.model_name}".encode()).hexdigest()
        self._shape = KvShape(
            model_fingerprint=fingerprint,
            dtype=self._layout.dtype,
            groups=group_layers(SIM_WINDOWS, kv_heads=SIM_KV_HEADS, head_dim=SIM_HEAD_DIM),
        )
        self._salt = int(fingerprint[:16], 16)
        self._cells: _Cells

    async def start(self) -> RunnerInfo:
        config = self._config
        block_bytes = self._shape.token_bytes * self._layout.block_tokens
        blocks = config.kv_blocks or max(1, config.kv_cache_bytes // block_bytes)
        self._cells = _Cells(blocks, self._layout.block_tokens)
        return RunnerInfo(
            shape=self._shape,
            layout=self._layout,
            blocks_total=blocks,
            max_model_len_tokens=config.sim.max_model_len_tokens,
            vocab_size=SIM_VOCAB_SIZE,
            eos_token_ids=frozenset({SIM_EOS_TOKEN_ID}),
        )

    async def stop(self) -> None:
        """Nothing is held."""

    async def execute(self, batch: Batch) -> StepResult:
        took_s = self._costs.batch_s(batch)
        await asyncio.sleep(took_s)
        return StepResult([self._result(work) for work in batch.works], took_s)

    def _result(self, work: Work) -> WorkResult:
        try:
            if work.load:
                self._verify(work.sequence)
            if not work.copies:
                self._cells.write(work)
            self._save(work)
        except IsthmusError as error:
            return WorkResult(fault=error.to_fault())
        if work.prefill and work.sample:
            self._cells.verify(work)
        return self._sample(work.sequence) if work.sample else WorkResult()

    # -- tokens -----------------------------------------------------------------------------------------------------

    def _sample(self, sequence: SequenceState) -> WorkResult:
        sampling, index = sequence.request.sampling, sequence.next_output_index
        if sequence.runner_note is None:
            prompt = sequence.request.token_ids[: sequence.prompt_tokens - sequence.request.output_offset]
            sequence.runner_note = hashlib.blake2b(np.asarray(prompt, dtype=np.uint32).tobytes()).digest()
        text = sequence.runner_note + sampling.seed.to_bytes(8, "little") + index.to_bytes(8, "little")
        digest = hashlib.blake2b(text, digest_size=24, person=b"isthmus-sim").digest()
        token_id = _FIRST_PRINTABLE + int.from_bytes(digest[:8], "little") % _PRINTABLES
        if int.from_bytes(digest[8:16], "little") < self._config.sim.eos_chance * 2**64:
            token_id = SIM_EOS_TOKEN_ID
        if sampling.logprobs is None:
            return WorkResult(token_id=token_id)
        probability = (1 + digest[16]) / 257  # in (0, 1)
        top = _top(token_id, math.log(probability), sampling.logprobs)
        return WorkResult(token_id=token_id, logprob=TokenLogprob(logprob=math.log(probability), top=top))

    # -- KV ---------------------------------------------------------------------------------------------------------

    def _save(self, work: Work) -> None:
        sequence, sink = work.sequence, work.sequence.sink
        start = sequence.saved  # cached tokens before the step's own are saved with it
        if sink is None or start >= work.end:
            return
        index = CanonicalIndex(self._shape.manifest(sequence.sink_tokens))
        for layer in index.layers:
            for part in KvPart:
                span = index.span(layer, part, start, work.end)
                if span is not None:
                    tokens = sequence.tokens[span.token_start : span.token_end]
                    write_span(sink, span, self._pattern(layer, part, tokens, span.token_start))

    def _verify(self, sequence: SequenceState) -> None:
        source = sequence.request.kv_load
        assert source is not None, "it loads"
        index = CanonicalIndex(self._shape.manifest(sequence.request.loaded_tokens))
        for layer in index.layers:
            for part in KvPart:
                span = index.whole(layer, part)
                tokens = sequence.tokens[span.token_start : span.token_end]
                wanted = self._pattern(layer, part, tokens, span.token_start)
                got = read_span(source, span)
                if not np.array_equal(got, wanted):
                    row = int(np.flatnonzero(got != wanted)[0]) * len(tokens) // span.size_bytes
                    raise TransferFailed(
                        "KV of another prompt or place",
                        why=f"layer {layer}, {part.name}, token {span.token_start + row} differs",
                        todo="prefill it again",
                    )

    def _pattern(self, layer: int, part: KvPart, token_ids: Sequence[int], first_position: int) -> Bytes:
        """The bytes of those tokens' rows, as on the wire."""
        tokens = np.asarray(token_ids, dtype=np.uint64)
        positions = np.arange(first_position, first_position + len(tokens), dtype=np.uint64)
        salt = np.uint64((self._salt + 2 * layer + part) % 2**64)
        rows = _mix(_mix(tokens ^ salt) + positions)
        words = SIM_KV_HEADS * SIM_HEAD_DIM * self._shape.dtype.itemsize_bytes // 8
        columns = np.arange(words, dtype=np.uint64)
        return _mix(rows[:, None] + columns[None, :]).astype("<u8").view(np.uint8).reshape(-1)


@dataclass(frozen=True, slots=True)
class _Linear:
    costs: SimCosts

    def batch_s(self, batch: Batch) -> float:
        return self.costs.step_s(
            prefill_tokens=batch.prefill_tokens,
            decode_sequences=batch.decode_sequences,
            resident_tokens=sum(work.end for work in batch.works if work.decodes),
        )


class _Cells:
    """What is in the cache, one token id for each place; a loaded prompt's places are nobody else's, and say so."""

    FOREIGN = -1

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._tokens = np.full(blocks * block_tokens, self.FOREIGN, dtype=np.int32)

    def write(self, work: Work) -> None:
        if work.load:
            self._tokens[self._places(work, 0, work.start)] = self.FOREIGN
        if len(work.tokens) == 1:  # most works are: arrays of one cost more than they save
            block, place = divmod(work.start, self._block_tokens)
            self._tokens[work.block_table[block] * self._block_tokens + place] = work.tokens[0]
            return
        self._tokens[self._places(work, work.start, work.end)] = work.tokens

    def verify(self, work: Work) -> None:
        sequence = work.sequence
        start = sequence.request.loaded_tokens if sequence.foreign else 0
        there = self._tokens[self._places(work, start, work.end)]
        right = np.array_equal(there, np.asarray(sequence.tokens[start : work.end], dtype=np.int32))
        assert right, f"sequence {work.sequence.uid} was given blocks of another prefix"

    def _places(self, work: Work, start: int, end: int) -> npt.NDArray[np.int64]:
        positions = np.arange(start, end)
        table = np.asarray(work.block_table, dtype=np.int64)
        return table[positions // self._block_tokens] * self._block_tokens + positions % self._block_tokens


def _mix(words: Words) -> Words:
    """A bijection of 64 bits in which every input bit changes about half of the output (multiply and shift rounds)."""
    words = (words ^ (words >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    words = (words ^ (words >> np.uint64(29))) * np.uint64(0x9FB21C651E98DF25)
    return words ^ (words >> np.uint64(32))


def _top(token_id: int, logprob: float, count: int) -> tuple[tuple[int, float], ...]:
    others = [_FIRST_PRINTABLE + (token_id + step) % _PRINTABLES for step in range(1, count + 1)]
    ranked = [token_id, *(other for other in others if other != token_id)][:count]
    return tuple((token, logprob - rank) for rank, token in enumerate(ranked))
