"""What one worker's steps cost, learned while it works. Pure: recursive least squares without NumPy.

A step with B decoding sequences that hold K tokens, and with N prompt tokens in it, takes
`base + B · per_sequence + K · per_kv_token + N · per_prefill_token`. Residuals are relative, so that short steps count
as much as long ones. Old observations fade; the prior does not, so a cost that nothing shows any more goes back to it
instead of drifting off. No cost goes below zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TERMS = 4
FADE = 0.98
"""Weight of an observation against the next one: some 50 count, a few seconds of a busy worker."""
PRIOR_DEVIATION = 3.0
"""Of each cost, relative to its prior: priors are right within a factor of a few."""
NOISE = 0.05
"""Relative scatter of a step's time around the law."""
OUTLIER = 4.0
"""In units of the scatter seen: such a step (a pause of the machine, a compilation) teaches nothing."""
OUTLIER_FLOOR = 0.2
"""Relative; less is no outlier however quiet the worker has been."""
WARM_OBSERVATIONS = 12
"""At the start, and after a change: so many are believed in any case, for the expectation may be what is wrong."""
CHANGE_IN_A_ROW = 6
"""So many outliers on one side after each other are no outliers: the worker has changed."""
CHANGE_FADE = 0.02
"""What the past is still worth then."""
SCATTER_SHARE = 0.05
"""Of the newest residual in the scatter."""
LEAST_S = 1e-7


@dataclass(frozen=True, slots=True)
class StepObservation:
    step_s: float
    decode_sequences: int
    kv_tokens: int
    """In the cache while it ran."""
    prefill_tokens: int


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds."""

    base_s: float
    per_sequence_s: float
    per_kv_token_s: float
    per_prefill_token_s: float

    def step_s(self, sequences: float, kv_tokens: float, prefill_tokens: float = 0.0) -> float:
        return (
            self.base_s
            + sequences * self.per_sequence_s
            + kv_tokens * self.per_kv_token_s
            + prefill_tokens * self.per_prefill_token_s
        )


@dataclass(frozen=True, slots=True)
class LiveCosts:
    """An estimate at one moment."""

    costs: StepCosts
    decode_seen: int
    """Steps with decoding sequences that it rests on, since the start."""
    prefill_seen: int
    chunk_tokens: int
    """Most prompt tokens that a step has had; a longer prompt takes several."""
    spread: float
    """p90 over p50 of a step."""
    prefill_share: float = 0.0
    """Of the time that passed lately, what prompts took: decoding sequences waited so long."""

    def prefill_s(self, tokens: float, sequences: float, kv_tokens: float) -> float:
        """Of so many prompt tokens, in steps that also decode `sequences` with `kv_tokens` in the cache."""
        steps = math.ceil(tokens / max(self.chunk_tokens, 1))
        return steps * self.costs.step_s(sequences, kv_tokens) + tokens * self.costs.per_prefill_token_s


class StepEstimator:
    """One worker's. Its state has a fixed size."""

    def __init__(self, prior: StepCosts, *, fade: float = FADE) -> None:
        """Every cost of the prior is positive: it is the unit in which the cost is learned."""
        self._kept = fade
        self._unit = (prior.base_s, prior.per_sequence_s, prior.per_kv_token_s, prior.per_prefill_token_s)
        assert all(value > 0 for value in self._unit), "a cost that is 0 could never be learned"
        self._information = [[0.0] * TERMS for _ in range(TERMS)]
        self._score = [0.0] * TERMS
        self._ratios = [1.0] * TERMS
        self._scatter = NOISE
        self._in_a_row = 0
        self._to_believe = WARM_OBSERVATIONS
        self._decode_seen = self._prefill_seen = self._chunk_tokens = self._seen = 0

    @property
    def live(self) -> LiveCosts:
        base_s, sequence_s, kv_s, prefill_s = (r * u for r, u in zip(self._ratios, self._unit, strict=True))
        return LiveCosts(
            StepCosts(base_s, sequence_s, kv_s, prefill_s),
            decode_seen=self._decode_seen,
            prefill_seen=self._prefill_seen,
            chunk_tokens=self._chunk_tokens,
            spread=math.exp(1.6 * min(self._scatter, 1.0)),  # |residual| averages 0.8 σ; p90 lies at 1.28 σ
        )

    @property
    def seen(self) -> int:
        """Steps learned from."""
        return self._seen

    def observe(self, seen: StepObservation) -> bool:
        """Learns from a step. False: it was taken for an outlier, or is no measurement at all."""
        if not (math.isfinite(seen.step_s) and seen.step_s > 0) or seen.decode_sequences + seen.prefill_tokens <= 0:
            return False
        amounts = (1.0, float(seen.decode_sequences), float(seen.kv_tokens), float(seen.prefill_tokens))
        parts = [amount * unit for amount, unit in zip(amounts, self._unit, strict=True)]
        expected_s = max(sum(part * ratio for part, ratio in zip(parts, self._ratios, strict=True)), LEAST_S)
        residual = math.log(seen.step_s / expected_s)
        if self._is_outlier(residual):
            return False
        self._seen += 1
        self._decode_seen += seen.decode_sequences > 0
        self._prefill_seen += seen.prefill_tokens > 0
        self._chunk_tokens = max(self._chunk_tokens, seen.prefill_tokens)
        self._scatter += SCATTER_SHARE * (min(abs(residual), 1.0) - self._scatter)
        # In units of the time that was seen: an expectation far too high or low would weigh wrongly.
        self._learn([part / seen.step_s for part in parts])
        return True

    def check_invariants(self) -> None:
        assert all(ratio >= 0 and math.isfinite(ratio) for ratio in self._ratios)
        assert 0 <= self._scatter <= 1

    def _is_outlier(self, residual: float) -> bool:
        if self._to_believe or abs(residual) <= max(OUTLIER_FLOOR, OUTLIER * self._scatter):
            self._to_believe, self._in_a_row = max(0, self._to_believe - 1), 0
            return False
        same_side = self._in_a_row * residual > 0
        self._in_a_row = (self._in_a_row if same_side else 0) + (1 if residual > 0 else -1)
        if abs(self._in_a_row) < CHANGE_IN_A_ROW:
            return True
        self._to_believe, self._in_a_row = WARM_OBSERVATIONS, 0
        self._fade(CHANGE_FADE)
        return False

    def _fade(self, share: float) -> None:
        self._information = [[value * share for value in row] for row in self._information]
        self._score = [value * share for value in self._score]

    def _learn(self, shares: Sequence[float]) -> None:
        """`shares · ratios = 1`, give or take `NOISE`."""
        self._fade(self._kept)
        weight = 1.0 / NOISE**2
        for i, at_i in enumerate(shares):
            self._score[i] += weight * at_i
            for j, at_j in enumerate(shares):
                self._information[i][j] += weight * at_i * at_j
        prior = 1.0 / PRIOR_DEVIATION**2
        matrix = [
            [value + (prior if i == j else 0.0) for j, value in enumerate(row)]
            for i, row in enumerate(self._information)
        ]
        self._ratios = _solve_non_negative(matrix, [value + prior for value in self._score])


def _solve_non_negative(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The solution, with terms that would be negative left out one by one, the worst first."""
    free = list(range(len(right)))
    while free:
        found = _solve([[matrix[i][j] for j in free] for i in free], [right[i] for i in free])
        worst = min(range(len(free)), key=found.__getitem__)
        if found[worst] >= 0:
            break
        del free[worst]
    answer = [0.0] * len(right)
    for index, value in zip(free, found if free else (), strict=True):
        answer[index] = value
    return answer


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Cholesky; the prior makes the matrix positive definite."""
    size = len(right)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            lower[i][j] = math.sqrt(max(rest, 1e-12)) if i == j else rest / lower[j][j]
    half = [0.0] * size
    for i in range(size):
        half[i] = (right[i] - sum(lower[i][k] * half[k] for k in range(i))) / lower[i][i]
    answer = [0.0] * size
    for i in reversed(range(size)):
        answer[i] = (half[i] - sum(lower[k][i] * answer[k] for k in range(i + 1, size))) / lower[i][i]
    return answer
