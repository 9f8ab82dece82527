"""Continuous batching: what the next step computes, and who holds which KV block. Pure: no clock, loop or tensor.

Rules
* Decoding sequences first, one token each; then prefills, oldest first, within `prefill_chunk_tokens` per step.
* A sequence is admitted only with blocks for all tokens it has, so that a prefill never stops half way.
* When a decoding sequence needs a block and none is free, the youngest running sequence is preempted: it gives back
  its blocks and computes its tokens anew later. Sampling depends on positions only, so its output is the same.
  No sequence may need more than the whole cache, hence the oldest always gets on, and so does each in its turn.
* Decode-only sequences hold nothing until their KV and first token are there; then they queue like the others. They
  may pass prefills that wait for the step's token budget, never one that waits for blocks. A resumed one has no first
  token to wait for, and once its KV is loaded it computes the rest of its tokens as a prefill does.
* A paused sequence keeps its blocks and computes nothing; what is given away of it leaves in pieces, one a step.
* Sequences are freed between steps only: `finish` while a batch is out would free blocks that are being written.
* Full blocks keep what is in them (`engines.blocks`): a sequence that is admitted takes over those with its prefix,
  and computes the rest, its last known token in any case. Two that compute the same block end up sharing it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass

from isthmus_shared.engines.blocks import BlockPool
from isthmus_shared.engines.port import EngineRequest
from isthmus_shared.engines.sequence import Batch, Phase, Sequence, Work
from isthmus_shared.errors import ContextTooLong, InvalidRequest, NoCapacity
from isthmus_shared.messages.route import PREFIX_BLOCK_TOKENS
from isthmus_shared.prefix import PrefixChain, wire_chain

NAME_BYTES = 32
"""Of a block's content: equal names must mean equal tokens and salts, whoever chose the prompts."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    block_tokens: int
    blocks_total: int
    max_model_len_tokens: int
    max_running: int
    """Sequences in a step; bounds a decode step's time."""
    prefill_chunk_tokens: int
    """Prompt tokens in a step; bounds what a prefill adds to others' inter-token latency."""
    max_waiting: int
    """Sequences that do not run yet, loading ones included; beyond it a submit is refused."""
    prefix_cache: bool = True


def begin_names(salt: str, block_tokens: int) -> tuple[PrefixChain, PrefixChain]:
    """Of a sequence's blocks, and of its prefixes as others are told of them."""
    return PrefixChain(salt, block_tokens=block_tokens, digest_bytes=NAME_BYTES), wire_chain(salt)


class Scheduler:
    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.blocks_total)
        self.loading: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.paused: dict[int, Sequence] = {}
        self.preemptions = 0
        self._next_uid = 0
        self._next_order = 0
        self._out: Batch | None = None

    # -- requests in ------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> Sequence:
        """Queue it, or raise `InvalidRequest`, `ContextTooLong` or `NoCapacity`."""
        prompt, offset = len(request.token_ids), request.output_offset
        if not request.token_ids or not 0 <= offset < len(request.token_ids):
            raise InvalidRequest(f"a prompt of {prompt} tokens, {offset} of them output", param="prompt")
        if offset >= request.sampling.max_tokens:
            raise InvalidRequest(
                f"max_tokens is {request.sampling.max_tokens}, but {offset} tokens are out already", param="max_tokens"
            )
        if request.kv_save is not None and request.kv_load is not None:
            raise InvalidRequest("a sequence either saves or loads its KV, not both")
        sequence = Sequence(
            uid=self._next_uid,
            request=request,
            max_tokens_total=prompt - offset + request.sampling.max_tokens,
            tokens=list(request.token_ids),
            phase=Phase.LOADING,
            prefill_until=prompt,
        )
        self._require_fit(sequence)
        if len(self.waiting) + len(self.loading) >= self.limits.max_waiting:
            raise NoCapacity(
                f"{self.limits.max_waiting} sequences wait already",
                todo="ask another worker, or raise max_waiting",
                retry_after_s=1.0,
            )
        self._next_uid += 1
        if self.limits.prefix_cache:
            sequence.names, sequence.prefixes = begin_names(request.cache_salt, self.limits.block_tokens)
        if request.kv_load is None:
            sequence.expected = len(self._cached(sequence)) * self.limits.block_tokens
            self._enqueue(sequence)
        else:
            sequence.loads, sequence.first_token_known = True, request.resumes
            self.loading[sequence.uid] = sequence
        return sequence

    def _require_fit(self, sequence: Sequence) -> None:
        limits = self.limits
        if sequence.max_tokens_total > limits.max_model_len_tokens:
            prompt = sequence.prompt_tokens - sequence.request.output_offset
            raise ContextTooLong(
                f"the context is {limits.max_model_len_tokens} tokens, but {sequence.max_tokens_total} are asked for",
                why=f"{prompt} in the prompt and up to {sequence.request.sampling.max_tokens} of output",
                todo="shorten the prompt or lower max_tokens",
                param="max_tokens" if prompt < limits.max_model_len_tokens else "prompt",
            )
        if self.blocks_for(sequence.kv_tokens_at_most) > limits.blocks_total:
            raise ContextTooLong(
                f"this worker's KV cache has {limits.blocks_total * limits.block_tokens} tokens, "
                f"but up to {sequence.kv_tokens_at_most} are needed",
                todo="shorten the prompt, lower max_tokens or enlarge the cache",
                param="prompt",
            )

    def source_ready(self, sequence: Sequence) -> bool:
        """The KV is there. True if the sequence has now entered the queue."""
        sequence.source_ready = True
        return self._enqueue_loaded(sequence)

    def first_token(self, sequence: Sequence, token_id: int) -> bool:
        """The prefill side's first token; a second one is ignored. True if the sequence has now entered the queue."""
        if sequence.phase is not Phase.LOADING or sequence.first_token_known:
            return False
        sequence.first_token_known = True
        sequence.tokens.append(token_id)
        return self._enqueue_loaded(sequence)

    # Of a sequence that has now entered the queue, the caller ends it before the next step if its first token was its
    # last one.

    def _enqueue_loaded(self, sequence: Sequence) -> bool:
        if sequence.phase is not Phase.LOADING or not (sequence.source_ready and sequence.first_token_known):
            return False
        del self.loading[sequence.uid]
        self._enqueue(sequence)
        return True

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.phase, sequence.order = Phase.WAITING, self._next_order
        self._next_order += 1
        self.waiting.append(sequence)

    # -- steps ------------------------------------------------------------------------------------------------------

    def schedule(self) -> Batch:
        """The next step's work. If there is any, `commit` must follow before anything is finished."""
        assert self._out is None, "the last batch has not been committed"
        works, preempted = self._decodes()
        budget = self.limits.prefill_chunk_tokens
        for sequence in self.running:
            if sequence.prefilling and budget > 0:
                works.append(self._prefill(sequence, budget))
                budget -= len(works[-1].tokens)
        if not preempted:
            self._admit(works, budget)
        works += [self._copy(sequence) for sequence in self.paused.values() if sequence.given_to is not None]
        batch = Batch(tuple(works))
        self._out = batch if works else None
        return batch

    def _decodes(self) -> tuple[list[Work], bool]:
        works: list[Work] = []
        preempted = False
        for sequence in list(self.running):
            if sequence.phase is not Phase.RUNNING or sequence.prefilling:
                continue
            while len(sequence.blocks) * self.limits.block_tokens <= sequence.computed:
                if self.pool.free:
                    sequence.blocks += self.pool.allocate(1)
                    continue
                preempted = True
                if self._preempt_youngest() is sequence:
                    break
            else:
                works.append(self._work(sequence, 1, prefill=False, load=False))
        return works, preempted

    def _preempt_youngest(self) -> Sequence:
        victim = self.running.pop()
        self.pool.release(victim.blocks)
        victim.phase, victim.computed, victim.prefill_until = Phase.WAITING, 0, len(victim.tokens)
        victim.foreign = False
        insort(self.waiting, victim, key=lambda sequence: sequence.order)
        self.preemptions += 1
        return victim

    def _admit(self, works: list[Work], budget: int) -> None:
        for sequence in list(self.waiting):
            if len(self.running) + len(self.paused) >= self.limits.max_running:
                return
            if budget <= 0 and (not sequence.loads or sequence.request.resumes):
                continue
            cached = self._cached(sequence)
            needed = self.blocks_for(min(len(sequence.tokens) + 1, sequence.kv_tokens_at_most)) - len(cached)
            if needed > self.pool.free - self.pool.idle_among(cached):
                return
            self.waiting.remove(sequence)
            self._give_blocks(sequence, cached)
            sequence.phase = Phase.RUNNING
            insort(self.running, sequence, key=lambda other: other.order)
            loads, sequence.loads = sequence.loads, False
            if loads:
                sequence.foreign, sequence.computed = True, sequence.request.loaded_tokens
            if loads and not sequence.prefilling:
                works.append(self._work(sequence, 1, prefill=False, load=True))
            else:
                works.append(self._prefill(sequence, budget, load=loads))
                budget -= len(works[-1].tokens)

    def _cached(self, sequence: Sequence) -> list[int]:
        """Blocks that it can take over: its prefix's, without the last known token's, whose logits are wanted."""
        if sequence.names is None or sequence.loads:
            return []
        whole = (len(sequence.tokens) - 1) // self.limits.block_tokens
        return self.pool.find(sequence.names.extend(sequence.tokens)[:whole])

    def _give_blocks(self, sequence: Sequence, cached: list[int]) -> None:
        self.pool.take_over(cached)
        new = self.pool.allocate(self.blocks_for(len(sequence.tokens)) - len(cached))
        sequence.blocks += cached + new
        sequence.named, sequence.computed = len(cached), len(cached) * self.limits.block_tokens
        if sequence.cached is None:
            sequence.cached = min(sequence.computed, sequence.prompt_tokens - sequence.request.output_offset)

    def _prefill(self, sequence: Sequence, budget: int, *, load: bool = False) -> Work:
        count = min(budget, sequence.prefill_until - sequence.computed)
        return self._work(sequence, count, prefill=True, load=load)

    def _copy(self, sequence: Sequence) -> Work:
        start = sequence.saved
        end = min(sequence.computed, start + self.limits.prefill_chunk_tokens)
        return Work(
            sequence=sequence,
            tokens=tuple(sequence.tokens[start:end]),
            start=start,
            block_table=tuple(sequence.blocks),
            prefill=False,
            load=False,
            sample=False,
            copies=True,
        )

    def _work(self, sequence: Sequence, count: int, *, prefill: bool, load: bool) -> Work:
        start = sequence.computed
        return Work(
            sequence=sequence,
            tokens=tuple(sequence.tokens[start : start + count]),
            start=start,
            block_table=tuple(sequence.blocks),
            prefill=prefill,
            load=load,
            sample=start + count == len(sequence.tokens),
        )

    def commit(self, batch: Batch, sampled: dict[int, int], spoiled: Collection[int] = ()) -> None:
        """The step is over; `sampled` has the next token by uid for each work that samples and did not fail.

        `spoiled`: uids of those that failed, whose KV nobody may use.
        """
        assert batch is self._out, "that batch is not out"
        self._out = None
        for work in batch.works:
            sequence = work.sequence
            if work.copies:
                sequence.saved = work.end
                continue
            sequence.computed = work.end
            if work.sample and sequence.uid in sampled:
                sequence.tokens.append(sampled[sequence.uid])
            if sequence.request.kv_save is not None:
                sequence.saved = max(sequence.saved, min(work.end, sequence.prompt_tokens))
            if sequence.uid not in spoiled:
                self._name_blocks(sequence)

    def distrust(self) -> None:
        """A step broke: what it has left in the cache is nobody's prefix."""
        self.pool.forget_all()

    def _name_blocks(self, sequence: Sequence) -> None:
        """Its full blocks are there for others from now on."""
        full = sequence.computed // self.limits.block_tokens
        if sequence.names is None or sequence.prefixes is None or sequence.foreign or full <= sequence.named:
            return
        names = sequence.names.extend(sequence.tokens, blocks=full)
        prefixes = sequence.prefixes.extend(sequence.tokens, blocks=sequence.computed // PREFIX_BLOCK_TOKENS)
        for place in range(sequence.named, full):
            start, end = place * self.limits.block_tokens, (place + 1) * self.limits.block_tokens
            ending = tuple(prefixes[start // PREFIX_BLOCK_TOKENS : end // PREFIX_BLOCK_TOKENS])
            sequence.blocks[place] = self.pool.keep(sequence.blocks[place], names[place], ending)
        sequence.named = full

    def pause(self, sequence: Sequence) -> None:
        """Take a decoding sequence out, between steps; it keeps its blocks."""
        assert self._out is None, "a step under way computes it"
        assert sequence.decoding, f"sequence {sequence.uid} does not decode"
        self.running.remove(sequence)
        sequence.phase = Phase.PAUSED
        self.paused[sequence.uid] = sequence

    def resume(self, sequence: Sequence) -> None:
        """Back to those that run, at its old place."""
        assert self._out is None, "a step under way copies it"
        del self.paused[sequence.uid]
        sequence.phase = Phase.RUNNING
        insort(self.running, sequence, key=lambda other: other.order)

    def finish(self, sequence: Sequence) -> None:
        """Take it out of whatever state it is in and free its blocks. Once only, between steps."""
        assert self._out is None, "blocks of a step under way would be freed"
        assert sequence.phase is not Phase.DONE, f"sequence {sequence.uid} ended twice"
        if sequence.phase is Phase.LOADING:
            del self.loading[sequence.uid]
        elif sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is Phase.PAUSED:
            del self.paused[sequence.uid]
        else:
            self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.phase = Phase.DONE

    # -- views ------------------------------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)

    @property
    def everyone(self) -> list[Sequence]:
        return [*self.running, *self.waiting, *self.loading.values(), *self.paused.values()]

    @property
    def stepping(self) -> bool:
        return self._out is not None

    @property
    def queued_prefill_tokens(self) -> int:
        """As far as it is known: what was in the cache at a submit will be there later."""
        waiting = sum(len(sequence.tokens) - sequence.expected for sequence in self.waiting if not sequence.loads)
        return waiting + sum(max(0, s.prefill_until - s.computed) for s in self.running)

    def check_invariants(self) -> None:
        everyone = self.everyone
        self.pool.check_invariants([sequence.blocks for sequence in everyone])
        assert len({s.uid for s in everyone}) == len(everyone), "a sequence is in two states"
        assert len(self.running) + len(self.paused) <= self.limits.max_running
        assert [s.order for s in self.waiting] == sorted(s.order for s in self.waiting), "the queue lost its order"
        assert [s.order for s in self.running] == sorted(s.order for s in self.running)
        for sequence in everyone:
            assert len(set(sequence.blocks)) == len(sequence.blocks), f"sequence {sequence.uid} has a block twice"
            if sequence.phase in (Phase.RUNNING, Phase.PAUSED):
                assert len(sequence.blocks) * self.limits.block_tokens >= sequence.computed
            else:
                assert not sequence.blocks, f"sequence {sequence.uid} is {sequence.phase} and holds blocks"
        assert self.pool.held + self.pool.free == self.pool.total, "blocks leaked"
