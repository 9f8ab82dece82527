"""Why the latest requests went where they went: what was weighed, what was predicted, and what became of it. Pure.

To remember a route costs some tens of microseconds; words and predictions are made when somebody asks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from isthmus_planner.routing.choose import NOTHING_CACHED, choose
from isthmus_planner.routing.notes import KeptPlan, Notes, Weighing, notes_of
from isthmus_planner.routing.predicting import prediction_of
from isthmus_planner.routing.refusing import Known
from isthmus_planner.routing.scorers.total import alone_scores, pair_scores
from isthmus_planner.routing.types import CachedTokens, Choice
from isthmus_planner.routing.view import View
from isthmus_shared.errors import IsthmusError
from isthmus_shared.ids import Incarnation, RequestId, asked_as
from isthmus_shared.messages.outcomes import MAX_CANDIDATES, Candidate, Explanation, Outcome
from isthmus_shared.messages.route import Mode, Prediction, RouteRequest
from isthmus_shared.messages.work import WorkerRef

KEPT_REQUESTS = 4096
KEPT_ROUTES = 8
"""Of one request, the latest: it is routed anew after each failure. Of refusals in a row, while it waits for a
worker, the last stands for all, so that they don't push out how it went before."""
MAX_TOLD = 2 * KEPT_ROUTES
"""In one answer: the latest."""


class _Chosen(NamedTuple):
    mode: Mode
    prefill: WorkerRef | None
    decode: WorkerRef
    predicted: Prediction
    score_s: float

    def told(self) -> Candidate:
        """Without its scores by scorer."""
        scores = {"total": self.score_s}
        return Candidate(
            mode=self.mode, prefill=self.prefill, decode=self.decode, predicted=self.predicted, scores=scores
        )


@dataclass(slots=True)
class _Routed:
    """One choice."""

    at_s: float
    isl_tokens: int
    max_osl_tokens: int
    tenant: str
    slo_class: str
    waited_s: float
    notes: list[Notes]
    chosen: _Chosen | None
    refused: str
    refusals: Counter[str]
    final: bool = False
    """It was carried out, or refused for good; else the next ask of that request replaces it."""


@dataclass(slots=True)
class _Kept:
    routes: list[_Routed] = field(default_factory=list)
    outcome: Outcome | None = None


class Explanations:
    def __init__(self, planner: Incarnation, *, keep: int = KEPT_REQUESTS) -> None:
        self._planner, self._keep = planner, keep
        self._kept: OrderedDict[RequestId, _Kept] = OrderedDict()
        self._by_client: dict[str, set[RequestId]] = {}
        """What clients know them by; one of several choices, or one that was used again, is several."""

    def __len__(self) -> int:
        return len(self._kept)

    def choose(
        self,
        request: RouteRequest,
        view: View,
        known: Callable[[], Known],
        now_s: float,
        cached: CachedTokens = NOTHING_CACHED,
    ) -> Choice:
        """As `routing.choose.choose`, and remembers it."""
        weighings: list[Weighing] = []
        try:
            choice = choose(request, view, known, self._planner, now_s, cached, weighings)
        except IsthmusError as error:
            self._add(request, weighings, now_s, None, error.text)
            raise
        self._add(request, weighings, now_s, choice, "")
        return choice

    def committed(self, request: RequestId) -> None:
        """Its latest choice is carried out."""
        kept = self._kept.get(request)
        if kept is not None:
            kept.routes[-1].final = True

    def refused(self, request: RequestId, error: IsthmusError) -> None:
        """Its latest choice was not good enough."""
        kept = self._kept.get(request)
        if kept is not None:
            kept.routes[-1].refused, kept.routes[-1].final = error.text, True
            if len(kept.routes) > 1 and kept.routes[-2].refused:
                del kept.routes[-2]

    def outcome(self, outcome: Outcome) -> None:
        kept = self._kept.get(outcome.request_id)
        if kept is not None:
            kept.outcome = outcome

    def of(self, request: RequestId, now_s: float) -> tuple[Explanation, ...]:
        """One for each time that it was routed, oldest first; none if it is not known here, or no longer.

        `request`: of one choice, or what its client knows it by (then of all its choices, the latest ones).
        """
        wanted = {request} if request in self._kept else self._by_client.get(request, set())
        found = [(routed, each, kept) for each in wanted for kept in (self._kept[each],) for routed in kept.routes]
        return tuple(
            self._told(each, routed, kept.outcome if routed is kept.routes[-1] else None, now_s)
            for routed, each, kept in sorted(found, key=lambda one: one[0].at_s)[-MAX_TOLD:]
        )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _add(
        self, request: RouteRequest, weighings: list[Weighing], now_s: float, choice: Choice | None, refused: str
    ) -> None:
        routed = _Routed(
            at_s=now_s,
            isl_tokens=request.isl_tokens,
            max_osl_tokens=request.max_osl_tokens,
            tenant=request.tenant,
            slo_class="" if request.slo is None else request.slo.name,
            waited_s=request.waited_s,
            notes=[notes_of(weighing) for weighing in weighings],
            chosen=None if choice is None else _chosen(choice),
            refused=refused,
            refusals=Counter({"has just failed this request": len(request.exclude)} if request.exclude else {}),
        )
        kept = self._kept.get(request.request_id)
        if kept is None:
            kept = self._kept[request.request_id] = _Kept()
            self._by_client.setdefault(asked_as(request.request_id), set()).add(request.request_id)
            if len(self._kept) > self._keep:
                self._forget_oldest()
        if kept.routes and (not kept.routes[-1].final or (kept.routes[-1].refused and routed.refused)):
            kept.routes.pop()
        kept.routes.append(routed)
        del kept.routes[:-KEPT_ROUTES]

    def _forget_oldest(self) -> None:
        request, _ = self._kept.popitem(last=False)
        client = asked_as(request)
        same = self._by_client[client]
        same.discard(request)
        if not same:
            del self._by_client[client]

    def _told(self, request: RequestId, routed: _Routed, outcome: Outcome | None, now_s: float) -> Explanation:
        candidates = sorted(
            (_candidate(plan) for notes in routed.notes for plan in notes.plans()),
            key=lambda candidate: sum(candidate.scores.values()),
        )[:MAX_CANDIDATES]
        chosen = _among(candidates, routed.chosen)
        if chosen is not None and chosen not in candidates:
            candidates = [chosen, *candidates[: MAX_CANDIDATES - 1]]
        weighed = sum(notes.weighed for notes in routed.notes)
        return Explanation(
            request_id=request,
            planner=self._planner,
            age_s=max(0.0, now_s - routed.at_s),
            isl_tokens=routed.isl_tokens,
            max_osl_tokens=routed.max_osl_tokens,
            tenant=routed.tenant,
            slo_class=routed.slo_class,
            waited_s=routed.waited_s,
            chosen=None if routed.refused else chosen,
            candidates=tuple(candidates),
            not_shown=max(0, weighed - len(candidates)),
            refusals=dict(routed.refusals),
            why=routed.refused or _why(chosen, candidates),
            outcome=outcome,
        )


def _candidate(plan: KeptPlan) -> Candidate:
    ask, prefill, decode, crossing = plan.ask, plan.prefill, plan.decode, plan.crossing
    first = decode if prefill is None else prefill
    scores = alone_scores(ask, decode) if prefill is None else pair_scores(ask, first, decode, crossing)
    return Candidate(
        mode=Mode.AGGREGATED if prefill is None else Mode.DISAGGREGATED,
        prefill=None if prefill is None else prefill.ref,
        decode=decode.ref,
        predicted=prediction_of(ask, first, decode, None if prefill is None else crossing.transfer_s),
        scores=scores,
    )


def _chosen(choice: Choice) -> _Chosen:
    prefill = None if choice.prefill is None else choice.prefill.ref
    return _Chosen(choice.mode, prefill, choice.decode.ref, choice.predicted, choice.score_s)


def _among(candidates: list[Candidate], chosen: _Chosen | None) -> Candidate | None:
    if chosen is None:
        return None
    plan = (chosen.prefill, chosen.decode)
    return next((each for each in candidates if (each.prefill, each.decode) == plan), None) or chosen.told()


def _why(chosen: Candidate | None, candidates: list[Candidate]) -> str:
    """The scorer that tells the chosen plan from the next best one most."""
    others = [candidate for candidate in candidates if candidate is not chosen]
    if chosen is None:
        return ""
    if not others:
        return "it was the only one"
    other = others[0]
    gains = {
        name: other.scores.get(name, 0.0) - chosen.scores.get(name, 0.0) for name in {*chosen.scores, *other.scores}
    }
    total_s = sum(other.scores.values()) - sum(chosen.scores.values())
    name = max(sorted(gains), key=lambda each: gains[each])
    if gains[name] <= 0:
        return "no other is better; the first by name"
    return f"{total_s:.4g} s better than {plan_in_words(other)}, most of all by {name} ({gains[name]:.4g} s)"


def plan_in_words(candidate: Candidate) -> str:
    if candidate.prefill is None:
        return f"{candidate.decode.worker_id} alone"
    return f"{candidate.prefill.worker_id} → {candidate.decode.worker_id}"
