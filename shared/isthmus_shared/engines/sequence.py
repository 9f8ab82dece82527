"""One sequence's state inside an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from isthmus_shared.engines.kv_port import KvSink
from isthmus_shared.engines.port import EngineRequest, PrefillTimes
from isthmus_shared.messages.work import FinishReason
from isthmus_shared.prefix import PrefixChain

MAX_CHUNKS = 256
"""Written down of one prompt; the rest would only lengthen a trace."""


class Phase(StrEnum):
    LOADING = "loading"
    """Decode only: its KV or its first token has not come. Holds no blocks."""
    WAITING = "waiting"
    RUNNING = "running"
    """Holds blocks for all tokens it has computed."""
    PAUSED = "paused"
    """Holds its blocks and computes nothing: it is being given away."""
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    uid: int
    """The engine's own id: a request id may come again (a re-plan) while its predecessor is still ending."""
    request: EngineRequest
    max_tokens_total: int
    """Prompt and output at most."""
    tokens: list[int]
    phase: Phase
    order: int = 0
    """Place in the queue, given once, when it could first run. Smaller is older."""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV is in the blocks."""
    prefill_until: int = 0
    """Tokens that must be computed before it decodes: the prompt, or everything so far after a preemption."""
    saved: int = 0
    """Tokens that are already in the sink; those of a step begin here, be they computed by it or cached."""
    given_to: KvSink | None = None
    """Paused: where its KV goes."""
    loads: bool = False
    """Its KV comes from `kv_load` when it is admitted, instead of being computed."""
    source_ready: bool = False
    first_token_known: bool = False
    submitted_s: float = 0.0
    begun_s: float = 0.0
    """When the first step that works on its prompt began."""
    chunks: list[tuple[int, float]] = field(default_factory=list)
    """(prompt tokens, when they were computed)."""
    names: PrefixChain | None = None
    """Of its blocks' contents; None where nothing is kept for others."""
    prefixes: PrefixChain | None = None
    """The same prefixes as others are told of them."""
    named: int = 0
    """Its first blocks that have their names."""
    cached: int | None = None
    """Prompt tokens that were in the cache when it first ran."""
    expected: int = 0
    """Tokens that were in the cache when it was submitted: as a rule it will not have to compute those."""
    foreign: bool = False
    """Its KV was loaded: what a window hides is not in its blocks, so nobody else may use them."""
    runner_note: bytes | None = None
    """The runner's own memo, dropped with the sequence."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prefill_until

    @property
    def decoding(self) -> bool:
        """Runs, and all but its last token have KV here."""
        return self.phase is Phase.RUNNING and not self.prefilling and self.request.kv_save is None

    @property
    def sink(self) -> KvSink | None:
        return self.request.kv_save if self.given_to is None else self.given_to

    @property
    def sink_tokens(self) -> int:
        """What the sink's flow is for."""
        return self.prompt_tokens if self.given_to is None else self.computed

    @property
    def next_output_index(self) -> int:
        """Index in the output of the token that is sampled next."""
        return self.request.output_offset + len(self.tokens) - self.prompt_tokens

    def prefill_times(self) -> PrefillTimes | None:
        """None when nothing of it was prefilled here."""
        if not self.chunks:
            return None
        chunks = tuple((tokens, at_s - self.submitted_s) for tokens, at_s in self.chunks)
        return PrefillTimes(self.begun_s - self.submitted_s, chunks)

    @property
    def kv_tokens_at_most(self) -> int:
        """The last token's KV is never needed; a prefill-only sequence keeps only the prompt's."""
        return self.prompt_tokens if self.request.kv_save is not None else self.max_tokens_total - 1

    def finish_after(self, token_id: int, output_index: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the output ends with that token, or None. The ending token is part of the output."""
        sampling = self.request.sampling
        if token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if output_index + 1 >= sampling.max_tokens else None


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a step: compute `tokens` (positions `start …`), after loading if it loads; or only copy
    their KV into the sink."""

    sequence: Sequence
    tokens: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    prefill: bool
    load: bool
    sample: bool
    """These tokens are its last known ones: a next token comes out."""
    copies: bool = False
    """Nothing is computed."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def decodes(self) -> bool:
        return not self.prefill and not self.copies


@dataclass(frozen=True, slots=True)
class Batch:
    works: tuple[Work, ...]

    def note_prefill(self, *, begun_s: float, ended_s: float) -> None:
        """Write down for each prompt in it that a chunk of it was computed between those times."""
        for work in self.works:
            if work.prefill and len(work.sequence.chunks) < MAX_CHUNKS:
                if not work.sequence.chunks:
                    work.sequence.begun_s = begun_s
                work.sequence.chunks.append((len(work.tokens), ended_s))

    @property
    def prefill_tokens(self) -> int:
        return sum(len(work.tokens) for work in self.works if work.prefill)

    @property
    def decode_sequences(self) -> int:
        return sum(work.decodes for work in self.works)

    @property
    def kv_loads(self) -> int:
        return sum(work.load for work in self.works)
