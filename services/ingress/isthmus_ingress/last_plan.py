"""Routes for the time without a planner: by the last plan that one has published, until it is too old. Pure.

Among the pairs that may serve the request, smooth weighted round-robin: each gets its share, spread evenly, whatever
the order of requests. Nothing is known of anyone's load, so this is for seconds, not for good.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.route import Mode, PlannedPair, Route, RoutePlan, RouteRequest

SILENT_S = 1.0
"""After a question that no planner has answered in time, so long none is asked: otherwise every request would wait
out its own."""

_Key = tuple[Incarnation | None, Incarnation]


@dataclass(slots=True)
class LastPlan:
    _plan: RoutePlan | None = None
    _taken_s: float = 0.0
    _silent_until_s: float = 0.0
    _credit: dict[_Key, float] = field(default_factory=dict)
    _gone: set[Incarnation] = field(default_factory=set)
    """Since the plan came: as many as there were workers."""

    def take(self, plan: RoutePlan, *, now_s: float) -> None:
        """Replaces the one before. What each pair is still due stays."""
        self._plan, self._taken_s, self._silent_until_s = plan, now_s, 0.0
        self._gone.clear()
        keys = {_key(pair) for model in plan.models for pair in model.pairs}
        self._credit = {key: credit for key, credit in self._credit.items() if key in keys}

    def silence(self, *, now_s: float) -> None:
        """A planner did not answer in time."""
        self._silent_until_s = now_s + SILENT_S

    def planner_is_silent(self, *, now_s: float) -> bool:
        """Whether to go by the plan without asking. The next plan that comes ends it."""
        return now_s < self._silent_until_s and self._valid(now_s)

    def gone(self, worker: Incarnation) -> None:
        """That life is over: the plan goes on without it."""
        self._gone.add(worker)

    def route(self, request: RouteRequest, *, now_s: float) -> Route | None:
        """None: too old, or nobody in it may serve the request."""
        plan = self._plan
        if plan is None or not self._valid(now_s):
            return None
        out = {*request.exclude, *self._gone}
        pairs = [
            pair
            for model in plan.models
            if model.model == request.model
            for pair in model.pairs
            if request.isl_tokens < pair.max_context_tokens and not out.intersection(_key(pair))
        ]
        if not pairs:
            return None
        pair = self._next(pairs)
        return Route(
            mode=Mode.AGGREGATED if pair.prefill is None else Mode.DISAGGREGATED,
            prefill=pair.prefill,
            decode=pair.decode,
            deadlines=pair.deadlines,
            predicted=pair.predicted,
            planner=plan.planner,
        )

    def _valid(self, now_s: float) -> bool:
        return self._plan is not None and now_s - self._taken_s <= self._plan.valid_s

    def _next(self, pairs: list[PlannedPair]) -> PlannedPair:
        """Each earns its weight, the richest is taken and pays what all have earned."""
        for pair in pairs:
            key = _key(pair)
            self._credit[key] = self._credit.get(key, 0.0) + pair.weight
        best = max(pairs, key=lambda pair: self._credit[_key(pair)])
        self._credit[_key(best)] -= sum(pair.weight for pair in pairs)
        return best


def _key(pair: PlannedPair) -> _Key:
    return None if pair.prefill is None else pair.prefill.incarnation, pair.decode.incarnation
