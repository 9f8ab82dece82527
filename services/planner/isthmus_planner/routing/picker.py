"""The cheapest pair, or the cheapest worker alone. Pure, and deterministic: of equals the first by name.

A pair costs `p[i] + d[j] + x(i, j)`. What crosses is known to cost at least what the sending side needs for it, and at
least what the receiving side does, so most pairs need not be looked at: O(P + D) unless rails differ greatly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus_planner.routing.columns import NEVER

MAX_PAIRS = 1024
"""Looked at for one request at most: some 0.5 ms. Beyond it (very uneven rails) the best so far is taken."""

EQUAL_S = 1e-9
"""Two costs that differ by less are equal: sums of floats in another order."""


@dataclass(frozen=True, slots=True)
class PairCosts:
    prefill: Sequence[float]
    decode: Sequence[float]
    sent: Sequence[float]
    """With the least that any crossing from there costs."""
    received: Sequence[float]
    """With the least that any crossing to there costs."""
    crossing: Callable[[int, int], float]
    """Exact, of one pair; `NEVER` for two that are one worker."""


def least(costs: Sequence[float]) -> int | None:
    """Index of the first least one; None if there is none that is finite."""
    if not costs:
        return None
    best = min(costs)
    return None if best == NEVER else costs.index(best)


def best_pair(costs: PairCosts) -> tuple[int, int, float] | None:
    """(prefill, decode, cost)."""
    p, d, sent, received = costs.prefill, costs.decode, costs.sent, costs.received
    i, j = least(sent), least(received)
    if i is None or j is None:
        return None
    best = p[i] + d[j] + costs.crossing(i, j)
    least_p, least_d = min(p), min(d)
    if best <= max(sent[i] + least_d, received[j] + least_p) + EQUAL_S:
        return i, j, best
    return _search(costs, (i, j, best))


def _search(costs: PairCosts, first: tuple[int, int, float]) -> tuple[int, int, float] | None:
    """Rows and columns by their lower bounds, until none can be better than the best so far."""
    p, d, sent, received = costs.prefill, costs.decode, costs.sent, costs.received
    best_i, best_j, best = first
    least_d, least_received = min(d), received[first[1]]
    rows = sorted((i for i in range(len(p)) if sent[i] + least_d < best), key=sent.__getitem__)
    columns = sorted((j for j in range(len(d)) if received[j] < NEVER), key=received.__getitem__)
    looked = 0
    for i in rows:
        if sent[i] + least_d >= best or looked >= MAX_PAIRS:
            break
        if p[i] + least_received >= best:
            continue
        for j in columns:
            if p[i] + received[j] >= best or looked >= MAX_PAIRS:
                break
            looked += 1
            cost = p[i] + d[j] + costs.crossing(i, j)
            if cost < best:
                best_i, best_j, best = i, j, cost
    return None if best == NEVER else (best_i, best_j, best)
