"""Choosing a token: a pure function of (seed, output index, output so far, logits).

Nothing is remembered between calls, so a sequence that goes on elsewhere, or is recomputed, draws the same tokens.
The uniform number for an output index is a keyed hash (a counter-based generator), and the inverse of the
distribution's cumulative sum is taken in order of token id, so that probabilities of almost equal size do not swap.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from isthmus_shared.messages.work import SamplingParams, TokenLogprob

Floats = npt.NDArray[np.float64]


def sample(
    params: SamplingParams, *, output_index: int, previous: Sequence[int], logits: npt.NDArray[np.float32]
) -> tuple[int, TokenLogprob | None]:
    """The next token and, if asked, logprobs of the unmodified distribution.

    `previous`: the output so far, tokens of earlier attempts included. `logits`: [vocabulary].
    """
    raw = logits.astype(np.float64)
    token_id = _choose(params, output_index, _penalised(params, previous, raw))
    return token_id, None if params.logprobs is None else _logprob(raw, token_id, params.logprobs)


def uniform(seed: int, output_index: int) -> float:
    """In [0, 1), with 53 random bits."""
    text = seed.to_bytes(8, "little") + output_index.to_bytes(8, "little")
    digest = hashlib.blake2b(text, digest_size=8, person=b"isthmus-sample").digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53


def _penalised(params: SamplingParams, previous: Sequence[int], raw: Floats) -> Floats:
    if not previous or (params.presence_penalty == 0 and params.frequency_penalty == 0):
        return raw
    tokens, counts = np.unique(np.asarray(previous, dtype=np.int64), return_counts=True)
    changed = raw.copy()
    changed[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    return changed


def _choose(params: SamplingParams, output_index: int, logits: Floats) -> int:
    if params.temperature == 0:
        return int(np.argmax(logits))
    scaled = (logits - logits.max()) / max(params.temperature, 1e-5)  # below that it is greedy to the last bit
    weights = np.exp(scaled)
    kept = _truncate(params, weights / weights.sum())
    total = np.cumsum(kept)
    # Strictly above the draw, so that a token of no probability is never taken.
    at = int(np.searchsorted(total, uniform(params.seed, output_index) * total[-1], side="right"))
    return min(at, int(np.flatnonzero(kept)[-1]))


def _truncate(params: SamplingParams, probabilities: Floats) -> Floats:
    """min_p, then top_k, then top_p; what falls away becomes 0. At least the most likely token stays."""
    kept = probabilities
    if params.min_p > 0:
        kept = np.where(probabilities >= params.min_p * probabilities.max(), kept, 0.0)
    if 0 < params.top_k < len(kept) or params.top_p < 1:
        order = np.argsort(-kept, kind="stable")
        limit = params.top_k or len(order)
        if params.top_p < 1:
            ranked = kept[order[:limit]]
            mass_before = np.cumsum(ranked) - ranked
            limit = min(limit, max(1, int(np.count_nonzero(mass_before < params.top_p * ranked.sum()))))
        kept = kept.copy()
        kept[order[limit:]] = 0.0
    return kept


def _logprob(raw: Floats, token_id: int, top: int) -> TokenLogprob:
    peak = float(raw.max())
    log_total = peak + math.log(float(np.exp(raw - peak).sum()))
    best = np.argsort(-raw, kind="stable")[:top]
    return TokenLogprob(
        logprob=float(raw[token_id]) - log_total,
        top=tuple((int(token), float(raw[token]) - log_total) for token in best),
    )
