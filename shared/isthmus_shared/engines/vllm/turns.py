"""What goes into vLLM's thread and what comes out of it. Knows nothing of vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isthmus_shared.kv.shape import KvShape

SAMPLING_KEY = "isthmus_sampling"
"""Key of vLLM's `SamplingParams.extra_args` that the sampler reads."""


@dataclass(frozen=True, slots=True)
class CoreInfo:
    shape: KvShape
    max_model_len_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    block_tokens: int
    blocks_total: int
    layout: str
    version: str


@dataclass(frozen=True, slots=True)
class NewRequest:
    name: str
    token_ids: tuple[int, ...]
    params: dict[str, Any]
    """Keyword arguments of vLLM's `SamplingParams`."""
    loads: bool = False
    """Its prompt's KV is loaded, but for the last token."""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class TokenLine:
    """One token; with logprobs its own, and the most likely ones (the token itself is always among them)."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step did to one request."""

    name: str
    tokens: tuple[TokenLine, ...]
    finish: str | None
    """vLLM's word: stop, length, abort, error."""
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of the engine gave."""

    progress: tuple[Progress, ...]
    refused: tuple[tuple[str, str], ...]
    """(name, why) of new requests that vLLM did not take."""
    released: frozenset[str]
    """Requests that hold nothing in vLLM any more."""
    took_s: float
    prefill_tokens: int
    decode_sequences: int
    running: int
    waiting: int
    blocks_free: int
    preemptions: int
    idle: bool
    """Nothing is left to step."""
