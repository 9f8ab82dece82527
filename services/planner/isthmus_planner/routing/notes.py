"""What was weighed for one request, small enough to keep thousands: the best few workers of each kind as they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from heapq import nsmallest
from operator import attrgetter

from isthmus_planner.routing.ask import NO_CROSSING, Ask, Crossing
from isthmus_planner.routing.columns import NEVER
from isthmus_planner.routing.seat import Seat
from isthmus_shared.messages.health import WorkerHeartbeat

KEPT_SEATS = 4
"""Of each kind: up to 16 pairs and 4 lone workers to be told of."""

_NUMBERS = tuple(field.name for field in fields(Seat) if field.name != "beat")
_numbers = attrgetter(*_NUMBERS)


@dataclass(frozen=True, slots=True)
class Weighing:
    """The costs that a picker chose from, as it saw them. Of pairs if `prefill` is there, else of lone workers."""

    ask: Ask
    decode: Sequence[Seat]
    decode_costs: Sequence[float]
    prefill: Sequence[Seat] = ()
    prefill_costs: Sequence[float] = ()
    crossing: Callable[[int, int], Crossing] | None = None
    excluded: int = 0


@dataclass(frozen=True, slots=True)
class _Kept:
    beat: WorkerHeartbeat
    """Any of that life: only what does not change within it is read."""
    numbers: tuple[object, ...]

    def seat(self) -> Seat:
        return Seat(beat=self.beat, **dict(zip(_NUMBERS, self.numbers, strict=True)))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class KeptPlan:
    ask: Ask
    prefill: Seat | None
    decode: Seat
    crossing: Crossing


@dataclass(frozen=True, slots=True)
class Notes:
    """Of one weighing."""

    ask: Ask
    prefill: tuple[_Kept, ...]
    decode: tuple[_Kept, ...]
    crossings: tuple[Crossing, ...]
    """Row by row of `prefill`."""
    weighed: int
    """Plans in all."""

    def plans(self) -> list[KeptPlan]:
        decode = [kept.seat() for kept in self.decode]
        if not self.prefill:
            return [KeptPlan(self.ask, None, seat, NO_CROSSING) for seat in decode]
        crossings = iter(self.crossings)
        pairs = [(kept.seat(), seat) for kept in self.prefill for seat in decode]
        return [
            KeptPlan(self.ask, first, second, next(crossings)) for first, second in pairs if first.life != second.life
        ]


def notes_of(weighing: Weighing, beat_of: Callable[[Seat], WorkerHeartbeat]) -> Notes:
    """`beat_of`: one heartbeat for each life, so that thousands of notes keep no more than that."""
    first = _best(weighing.prefill_costs)
    second = _best(weighing.decode_costs)
    prefill, decode = [weighing.prefill[i] for i in first], [weighing.decode[j] for j in second]
    cached = {
        seat.life: weighing.ask.cached[seat.life] for seat in (*prefill, *decode) if seat.life in weighing.ask.cached
    }
    crossing = weighing.crossing
    return Notes(
        ask=replace(weighing.ask, cached=cached),
        prefill=tuple(_Kept(beat_of(seat), _numbers(seat)) for seat in prefill),
        decode=tuple(_Kept(beat_of(seat), _numbers(seat)) for seat in decode),
        crossings=()
        if crossing is None
        else tuple(
            crossing(i, j) for i in first for j in second if weighing.prefill[i].life != weighing.decode[j].life
        ),
        weighed=_possible(weighing.decode_costs) * (_possible(weighing.prefill_costs) if weighing.prefill else 1),
    )


def _best(costs: Sequence[float]) -> list[int]:
    return [i for cost, i in nsmallest(KEPT_SEATS, zip(costs, range(len(costs)), strict=True)) if cost < NEVER]


def _possible(costs: Sequence[float]) -> int:
    return len(costs) - costs.count(NEVER)
