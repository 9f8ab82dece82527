"""The engine port: what a worker asks of whatever computes tokens.

An engine is one model on one worker with continuous batching. It is driven by `submit`, `start_decode` and
`abort`, none of which waits, and answers through `steps()`: one `StepReport` after each step that produced
something, so that a worker sends one message per step, not one per token.

A request runs in one of three ways:

* aggregated:  `kv_save` and `kv_load` None. Prefill, then decode to the end.
* prefill only: `kv_save` given. The prompt's KV is written into the sink as it is computed, the first token is
  reported, and the sequence ends with `HANDOFF` (or with its real reason, if that one token ends it). Its KV blocks
  are free as soon as the sink is sealed.
* decode only: `kv_load` given, for all of `token_ids`. The sequence costs nothing until the source is ready *and*
  `start_decode` has named the first token; then, at a step boundary, blocks are allocated, the KV is copied in, the
  source is released and the second token is computed.
* resumed: `kv_load` given, for the first `kv_manifest.prompt_tokens` of `token_ids` only. As above, but nothing waits
  for `start_decode`: the tokens that the source does not have are computed, and the next one is sampled.

A sequence that decodes may be given away: `pause` takes it out at a step boundary, `save` writes its KV (of all tokens
but the last, which has none yet) into a sink and ends it with `HANDOFF`; `resume` lets it go on instead.

Sampling is a pure function of (seed, output index, logits), so a sequence may stop on one worker and go on on
another and still give the same tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from isthmus_shared.engines.kv_port import KvSink, KvSource
from isthmus_shared.engines.prefix_log import PrefixLog
from isthmus_shared.errors import Fault
from isthmus_shared.ids import RequestId
from isthmus_shared.kv.manifest import KvManifest
from isthmus_shared.messages.work import FinishReason, SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is; fixed after `start`."""

    model: str
    model_fingerprint: str
    """Hash of the model's configuration and weights: equal means the same function from tokens to logits."""
    max_model_len_tokens: int
    kv_layout: str
    """The physical form of the cache, for people: e.g. ``NHD, block 16, fp32``."""
    kv_blocks_total: int
    kv_block_tokens: int


@dataclass(frozen=True, slots=True)
class EngineRequest:
    request_id: RequestId
    token_ids: tuple[int, ...]
    """Prompt, followed by `output_offset` tokens that earlier attempts have already given to the client."""
    sampling: SamplingParams
    output_offset: int = 0
    kv_save: KvSink | None = None
    kv_load: KvSource | None = None
    kv_manifest: KvManifest | None = None
    """What `kv_load` holds; None: what this engine's own `manifest` says. The caller has found them exchangeable."""
    cache_salt: str = ""
    """Prefixes are shared between requests of one salt only."""

    @property
    def loaded_tokens(self) -> int:
        """Tokens whose KV comes from `kv_load`."""
        if self.kv_load is None:
            return 0
        return len(self.token_ids) if self.kv_manifest is None else self.kv_manifest.prompt_tokens

    @property
    def resumes(self) -> bool:
        """Whether tokens after the loaded ones are known, so that no first token is waited for."""
        return self.kv_load is not None and self.loaded_tokens < len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """When a prompt was computed, in seconds from its submit."""

    begun_s: float
    chunks: tuple[tuple[int, float], ...]
    """(tokens, when they were done), in order."""


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one step did to one sequence."""

    request_id: RequestId
    output_index: int
    """Index in the output of the first token in `token_ids` (0 is the first token that the client sees)."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One entry per token when `sampling.logprobs` is not None."""
    finish: FinishReason | None = None
    fault: Fault | None = None
    """Set exactly when `finish` is ERROR."""
    cached_tokens: int = 0
    """With the first token: so many of the prompt's were in the cache, and were not computed for this request."""
    prefill: PrefillTimes | None = None
    """With the first token of a sequence that was prefilled here, where the engine knows."""


@dataclass(frozen=True, slots=True)
class StepReport:
    outputs: tuple[SequenceOutput, ...]
    step_s: float
    prefill_tokens: int
    decode_sequences: int
    kv_loads: int = 0
    """Sequences whose KV was copied in, where the engine knows."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A moment's load, for heartbeats and admission."""

    running: int
    waiting: int
    loading: int
    """Decode-only sequences whose KV or first token has not come yet."""
    queued_prefill_tokens: int
    kv_blocks_free: int
    decode_step_s: float | None
    """Recent mean time of a step with decoding sequences in it; None before the first."""
    prefill_tokens_per_s: float | None


class Engine(Protocol):
    async def start(self) -> EngineInfo:
        """Load and warm up; returns when the next request would run at full speed."""
        ...

    def manifest(self, prompt_tokens: int) -> KvManifest:
        """What a transfer of a prompt of that length holds here. Pure."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises `InvalidRequest`/`ContextTooLong` (can never run here) or `NoCapacity` (queue full).

        On an exception the caller still owns `kv_save`/`kv_load`; otherwise the engine ends them.
        """
        ...

    def start_decode(self, request_id: RequestId, first_token_id: int) -> None:
        """The first token of a decode-only sequence, as sampled by the prefill side. Unknown ids are ignored."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """End a sequence with CANCELLED at the next step boundary (between prefill chunks too). Unknown: ignored."""
        ...

    async def pause(self, request_id: RequestId) -> int:
        """Take a decoding sequence out at the next step boundary; returns the tokens whose KV it has, its last one's
        left out. All that it has given by then is in the reports before. It keeps its blocks until `save`, `resume` or
        `abort`.

        Raises `StaleParty` when it is not here or ends meanwhile, and `Unavailable` when it does not decode (yet) or
        this engine can't: then nothing has changed.
        """
        ...

    def save(self, request_id: RequestId, sink: KvSink) -> None:
        """Write a paused sequence's KV into that sink and end it: with HANDOFF once it is sealed, else with ERROR.

        Raises `StaleParty` or `ManifestMismatch`, and then the caller still owns the sink.
        """
        ...

    def resume(self, request_id: RequestId) -> None:
        """Let a paused sequence go on. Unknown ids, and others, are ignored."""
        ...

    def steps(self) -> AsyncIterator[StepReport]:
        """Reports in order; one consumer. Ends after `stop`."""
        ...

    def load(self) -> EngineLoad: ...

    @property
    def prefixes(self) -> PrefixLog | None:
        """What it has cached of prompts, from `start` on; None where it keeps nothing or does not say."""
        ...

    async def stop(self) -> None:
        """End every sequence with CANCELLED, free everything, stop stepping."""
        ...
