"""What was weighed for one request, small enough to keep thousands: the best few workers of each kind as they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from heapq import nsmallest
from operator import attrgetter
from typing import NamedTuple, Protocol

from isthmus_planner.routing.ask import NO_CROSSING, Ask, Crossing
from isthmus_planner.routing.columns import NEVER
from isthmus_planner.routing.seat import Seat
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.health import WorkerHeartbeat

KEPT_SEATS = 4
"""Of each kind: up to 16 pairs and 4 lone workers to be told of."""
MANY = 128
"""From so many workers on, sorting them all takes longer than looking for the few."""

_NUMBERS = tuple(field.name for field in fields(Seat) if field.name != "beat")
_numbers = attrgetter(*_NUMBERS)


class Crossings(Protocol):
    """Of one request's KV, between any two workers of a weighing, by their indices."""

    def transfer_s(self, i: int, j: int) -> float: ...

    def crossing(self, i: int, j: int) -> Crossing: ...


class Weighing(NamedTuple):
    """The costs that a picker chose from, as it saw them. Of pairs if `prefill` is there, else of lone workers."""

    ask: Ask
    decode: Sequence[Seat]
    decode_costs: Sequence[float]
    prefill: Sequence[Seat] = ()
    prefill_costs: Sequence[float] = ()
    crossings: Crossings | None = None


class _Kept(NamedTuple):
    beat: WorkerHeartbeat
    """Any of that life: only what does not change within it is read."""
    numbers: tuple[object, ...]

    def seat(self) -> Seat:
        return Seat(beat=self.beat, **dict(zip(_NUMBERS, self.numbers, strict=True)))  # type: ignore[arg-type]


class KeptPlan(NamedTuple):
    ask: Ask
    prefill: Seat | None
    decode: Seat
    crossing: Crossing


class Notes(NamedTuple):
    """Of one weighing."""

    ask: Ask
    prefill: list[_Kept]
    decode: list[_Kept]
    transfers_s: list[float]
    """Row by row of `prefill`."""
    staged: list[bool]
    """For each of `prefill`."""
    weighed: int
    """Plans in all."""

    def plans(self) -> list[KeptPlan]:
        decode = [kept.seat() for kept in self.decode]
        if not self.transfers_s:
            return [KeptPlan(self.ask, None, seat, NO_CROSSING) for seat in decode]
        transfers_s = iter(self.transfers_s)
        return [
            KeptPlan(self.ask, first, second, crossing)
            for first, staged in zip((kept.seat() for kept in self.prefill), self.staged, strict=True)
            for second, crossing in ((each, Crossing(next(transfers_s), staged)) for each in decode)
            if first.life != second.life
        ]


def notes_of(weighing: Weighing, beats: dict[Incarnation, WorkerHeartbeat]) -> Notes:
    """`beats`: one heartbeat for each life, so that thousands of notes keep no more than that; what is missing is put
    in."""
    ask, crossings = weighing.ask, weighing.crossings
    second = _best(weighing.decode_costs)
    decode = [_keep(weighing.decode[j], beats) for j in second]
    weighed = _possible(weighing.decode_costs)
    if crossings is None:
        return Notes(_without_others(ask, decode), [], decode, [], [], weighed)
    first = _best(weighing.prefill_costs)
    prefill = [_keep(weighing.prefill[i], beats) for i in first]
    transfers_s = [crossings.transfer_s(i, j) for i in first for j in second]
    staged = [crossings.crossing(i, second[0]).staged for i in first] if second else [True] * len(first)
    weighed *= _possible(weighing.prefill_costs)
    return Notes(_without_others(ask, prefill + decode), prefill, decode, transfers_s, staged, weighed)


def _keep(seat: Seat, beats: dict[Incarnation, WorkerHeartbeat]) -> _Kept:
    return _Kept(beats.setdefault(seat.beat.incarnation, seat.beat), _numbers(seat))


def _without_others(ask: Ask, kept: list[_Kept]) -> Ask:
    """The same, with what is cached at those workers only."""
    if not ask.cached:
        return ask
    lives = {each.beat.incarnation for each in kept}
    return replace(ask, cached={life: tokens for life, tokens in ask.cached.items() if life in lives})


def _best(costs: Sequence[float]) -> list[int]:
    """Indices of the first few, the least first."""
    if len(costs) > MANY:
        return [i for cost, i in nsmallest(KEPT_SEATS, zip(costs, range(len(costs)), strict=True)) if cost < NEVER]
    ranked = sorted(costs)
    most = ranked[min(KEPT_SEATS, len(ranked)) - 1]
    chosen = [i for i, cost in enumerate(costs) if cost <= most and cost < NEVER]
    return sorted(chosen, key=costs.__getitem__)[:KEPT_SEATS]


def _possible(costs: Sequence[float]) -> int:
    return len(costs) - costs.count(NEVER)
