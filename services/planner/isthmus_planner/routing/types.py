"""What a choice is, for those who act on it (the service, admission, explanations, the evaluation)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from isthmus_planner.routing.seat import Seat
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.route import Deadlines, Mode, Prediction, Route, RouteRequest


class CachedTokens(Protocol):
    """What prefix caches hold (`isthmus_planner.prefix`)."""

    def cached_tokens(self, prefix: Sequence[bytes]) -> Mapping[Incarnation, int]:
        """Tokens from the prompt's start that each worker's life has in its cache; who has none may be left out.

        `prefix`: `RouteRequest.prefix`, not empty. One walk along it: this is on the path of every route.
        """
        ...


class NothingCached:
    """Where nobody tells of prefix caches."""

    def cached_tokens(self, prefix: Sequence[bytes]) -> Mapping[Incarnation, int]:
        return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Choice:
    """The best that can be done with a request now, and whether that is good enough.

    Nothing is booked yet: `View.commit` does that, once it is to be carried out.
    """

    request: RouteRequest
    mode: Mode
    prefill: Seat | None
    """None: aggregated on `decode`, or (disaggregated) `decode` fetches what the request said is staged."""
    decode: Seat
    predicted: Prediction
    deadlines: Deadlines
    score_s: float
    """What the picker compared: the sum of all scorers."""
    planner: Incarnation
    ttft_over_s: float = 0.0
    """How far the predicted TTFT lies beyond what is left of the target; 0: it is met, or there is none."""
    itl_over_s: float = 0.0
    """The same of its own mean ITL, the crossing included."""
    residents_over_s: float = 0.0
    """How far ITL on the decode worker would lie beyond the strictest target of those who are there."""
    room: bool = True
    """Whether the decode worker has room for the prompt's KV now."""
    predicted_wait_s: float = 0.0
    """Until such a request would meet what this one misses, by what is queued and what ends; 0: it misses nothing."""

    @property
    def meets_ttft(self) -> bool:
        return self.ttft_over_s <= 0

    @property
    def meets_itl(self) -> bool:
        """Its own target and those of everyone already there."""
        return self.itl_over_s <= 0 and self.residents_over_s <= 0

    @property
    def feasible(self) -> bool:
        return self.room and self.meets_ttft and self.meets_itl

    @property
    def route(self) -> Route:
        return Route(
            mode=self.mode,
            prefill=None if self.prefill is None else self.prefill.ref,
            decode=self.decode.ref,
            deadlines=self.deadlines,
            predicted=self.predicted,
            planner=self.planner,
        )
