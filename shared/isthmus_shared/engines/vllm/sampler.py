"""Choosing tokens in vLLM as `engines.sampling` does: a pure function of (seed, output index, output so far, logits).

vLLM's own sampler keeps a random state per request, which starts anew when a sequence goes on elsewhere, and counts
penalties from where it was submitted. Here all but one token of a row is ruled out, and vLLM's greedy choice takes
the one that is left. Rows that are greedy and unpenalised are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from isthmus_shared.engines.sampling import uniform
from isthmus_shared.engines.vllm.turns import SAMPLING_KEY
from isthmus_shared.messages.work import SamplingParams

MIN_TEMPERATURE = 1e-5
"""Below that it is greedy to the last bit."""


@dataclass(slots=True)
class _Row:
    params: SamplingParams
    previous: tuple[int, ...]
    first_index: int
    output: Sequence[int] = field(default_factory=list)
    """vLLM's own list, which grows."""

    @property
    def draw(self) -> float:
        return uniform(self.params.seed, self.first_index + len(self.output))


class SeededSampler(LogitsProcessor):
    """One per engine; vLLM tells it which request is in which row."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            extra = (params.extra_args or {}).get(SAMPLING_KEY)
            if extra is None:
                self._rows.pop(index, None)
            else:
                self._rows[index] = _Row(**extra, output=output)
        for source, target, direction in batch_update.moved:
            moved, other = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if other is not None and direction is MoveDirectionality.SWAP:
                self._rows[source] = other

    def apply(self, logits: Tensor) -> Tensor:
        """[rows, vocabulary], changed in place."""
        if not self._rows:
            return logits
        indexes = sorted(self._rows)
        rows = [self._rows[index] for index in indexes]
        at = torch.tensor(indexes, device=logits.device)
        chosen = choose(rows, logits[at].double())
        logits[at] = float("-inf")
        logits[at, chosen] = 0.0
        return logits


def choose(rows: Sequence[Any], logits: Tensor) -> Tensor:
    """Token ids [rows], from fp64 logits [rows, vocabulary]; see `engines.sampling` for the law."""
    logits = _penalised(rows, logits)
    greedy = _column(rows, logits, lambda row: row.params.temperature == 0).bool()
    temperature = _column(rows, logits, lambda row: max(row.params.temperature, MIN_TEMPERATURE))
    weights = ((logits - logits.amax(dim=1, keepdim=True)) / temperature).exp()
    kept = _truncated(rows, weights / weights.sum(dim=1, keepdim=True))
    total = kept.cumsum(dim=1)
    draws = _column(rows, logits, lambda row: row.draw) * total[:, -1:]
    at = torch.searchsorted(total, draws, right=True)
    positions = torch.arange(logits.shape[1], device=logits.device)
    last = torch.where(kept > 0, positions, -1).amax(dim=1, keepdim=True)
    return torch.where(greedy, logits.argmax(dim=1, keepdim=True), torch.minimum(at, last)).squeeze(1)


def _penalised(rows: Sequence[Any], logits: Tensor) -> Tensor:
    for index, row in enumerate(rows):
        params = row.params
        so_far = [*row.previous, *row.output]
        if not so_far or (params.presence_penalty == 0 and params.frequency_penalty == 0):
            continue
        tokens, counts = torch.unique(torch.tensor(so_far, device=logits.device), return_counts=True)
        logits[index, tokens] -= params.presence_penalty + params.frequency_penalty * counts.double()
    return logits


def _truncated(rows: Sequence[Any], probabilities: Tensor) -> Tensor:
    """min_p, then top_k, then top_p; what falls away becomes 0. At least the most likely token stays."""
    min_p = _column(rows, probabilities, lambda row: row.params.min_p)
    kept = torch.where(probabilities >= min_p * probabilities.amax(dim=1, keepdim=True), probabilities, 0.0)
    if all(row.params.top_k == 0 and row.params.top_p >= 1 for row in rows):
        return kept
    ranked, order = kept.sort(dim=1, descending=True, stable=True)
    limit = _column(rows, kept, lambda row: row.params.top_k or kept.shape[1])
    ranked = torch.where(torch.arange(kept.shape[1], device=kept.device) < limit, ranked, 0.0)
    top_p = _column(rows, kept, lambda row: row.params.top_p)
    mass_before = ranked.cumsum(dim=1) - ranked
    within = (mass_before < top_p * ranked.sum(dim=1, keepdim=True)) | (top_p >= 1)
    within[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, order, torch.where(within, ranked, 0.0))


def _column(rows: Sequence[Any], like: Tensor, value: Any) -> Tensor:
    return torch.tensor([[float(value(row))] for row in rows], dtype=torch.float64, device=like.device)
