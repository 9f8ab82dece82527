"""What was weighed for one request, small enough to keep thousands: the best few workers of each kind as they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import nsmallest
from typing import NamedTuple, Protocol

from isthmus_planner.routing.ask import NO_CROSSING, Ask, Crossing
from isthmus_planner.routing.columns import NEVER
from isthmus_planner.routing.seat import Seat

KEPT_SEATS = 4
"""Of each kind: up to 16 pairs and 4 lone workers to be told of."""
MANY = 128
"""From so many workers on, sorting them all takes longer than looking for the few."""


class Crossings(Protocol):
    """Of one request's KV, between any two workers of a weighing, by their indices."""

    def transfer_s(self, i: int, j: int) -> float: ...

    def staged(self, i: int) -> bool: ...


class Weighing(NamedTuple):
    """The costs that a picker chose from, as it saw them. Of pairs if there are crossings, else of lone workers."""

    ask: Ask
    decode: Sequence[Seat]
    decode_costs: Sequence[float]
    prefill: Sequence[Seat] = ()
    prefill_costs: Sequence[float] = ()
    crossings: Crossings | None = None


class KeptPlan(NamedTuple):
    ask: Ask
    prefill: Seat | None
    decode: Seat
    crossing: Crossing


class Notes(NamedTuple):
    """Of one weighing."""

    ask: Ask
    prefill: list[Seat]
    decode: list[Seat]
    transfers_s: list[float]
    """Row by row of `prefill`."""
    staged: list[bool]
    """For each of `prefill`."""
    weighed: int
    """Plans in all."""

    def plans(self) -> list[KeptPlan]:
        if not self.transfers_s:
            return [KeptPlan(self.ask, None, seat, NO_CROSSING) for seat in self.decode]
        transfers_s = iter(self.transfers_s)
        return [
            KeptPlan(self.ask, first, second, crossing)
            for first, staged in zip(self.prefill, self.staged, strict=True)
            for second, crossing in ((each, Crossing(next(transfers_s), staged)) for each in self.decode)
            if first.life != second.life
        ]


def notes_of(weighing: Weighing) -> Notes:
    ask, crossings = weighing.ask, weighing.crossings
    second = _best(weighing.decode_costs)
    decode = [weighing.decode[j] for j in second]
    weighed = _possible(weighing.decode_costs)
    if crossings is None:
        return Notes(_without_others(ask, decode), [], decode, [], [], weighed)
    first = _best(weighing.prefill_costs)
    prefill = [weighing.prefill[i] for i in first]
    transfer_s = crossings.transfer_s
    transfers_s = [transfer_s(i, j) for i in first for j in second]
    staged = [crossings.staged(i) for i in first]
    weighed *= _possible(weighing.prefill_costs)
    return Notes(_without_others(ask, prefill + decode), prefill, decode, transfers_s, staged, weighed)


def _without_others(ask: Ask, kept: list[Seat]) -> Ask:
    """The same, with what is cached at those workers only."""
    if not ask.cached:
        return ask
    lives = {seat.life for seat in kept}
    return replace(ask, cached={life: tokens for life, tokens in ask.cached.items() if life in lives})


def _best(costs: Sequence[float]) -> list[int]:
    """Indices of the first few, the least first."""
    if len(costs) > MANY:
        return [i for cost, i in nsmallest(KEPT_SEATS, zip(costs, range(len(costs)), strict=True)) if cost < NEVER]
    most = sorted(costs)[min(KEPT_SEATS, len(costs)) - 1]
    chosen = [i for i, cost in enumerate(costs) if cost <= most and cost < NEVER]
    return sorted(chosen, key=costs.__getitem__)[:KEPT_SEATS]


def _possible(costs: Sequence[float]) -> int:
    return len(costs) - costs.count(NEVER)
