"""Routing as it is defined, pair by pair, for the fast one to be held to."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus_planner.routing.ask import Ask
from isthmus_planner.routing.filters import decodes, prefills, why_no_pair, why_unable
from isthmus_planner.routing.policy import ModePolicy
from isthmus_planner.routing.scorers.total import alone_scores, pair_scores
from isthmus_planner.routing.seat import Seat
from isthmus_planner.routing.view import View
from isthmus_shared.messages.route import RouteRequest

Plan = tuple[float, Seat | None, Seat]
"""(score, prefill, decode)"""


def naive(request: RouteRequest, ask: Ask, view: View, now_s: float) -> Plan | None:
    able = [seat for seat in view.seats() if why_unable(seat, request) is None]
    pairs = [] if view.policy.mode is ModePolicy.AGGREGATED else list(_pairs(ask, able, view, now_s))
    if pairs and view.policy.mode is ModePolicy.DISAGGREGATED:
        return min(pairs, key=_score)
    alone = list(_alone(ask, able))
    if not pairs and not alone and request.exclude:
        anew = request.model_copy(update={"exclude": ()})
        alone = list(_alone(ask, [seat for seat in view.seats() if why_unable(seat, anew) is None]))
    return min([*pairs, *alone], key=_score, default=None)


def _pairs(ask: Ask, able: list[Seat], view: View, now_s: float) -> Iterator[Plan]:
    for prefill in filter(prefills, able):
        for decode in filter(decodes, able):
            if why_no_pair(prefill, decode) is None:
                crossing = view.crossing(prefill, decode, ask.tokens, now_s)
                yield sum(pair_scores(ask, prefill, decode, crossing).values()), prefill, decode


def _alone(ask: Ask, able: list[Seat]) -> Iterator[Plan]:
    for worker in filter(decodes, able):
        yield sum(alone_scores(ask, worker).values()), None, worker


def _score(plan: Plan) -> float:
    return plan[0]
