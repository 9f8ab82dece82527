"""The choice of a route out of a view: O(prefill workers + decode workers). Pure.

The pairs' and the lone workers' best are found by columns; what is told of the one that is chosen is worked out by the
scorers themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from isthmus_planner.routing.ask import Ask, Crossing, ask_of
from isthmus_planner.routing.columns import NEVER
from isthmus_planner.routing.group import Group
from isthmus_planner.routing.notes import Weighing
from isthmus_planner.routing.picker import PairCosts, best_pair, least
from isthmus_planner.routing.policy import ModePolicy
from isthmus_planner.routing.predicting import Picked, choice_of
from isthmus_planner.routing.refusing import Known, refusal
from isthmus_planner.routing.scorers import targets
from isthmus_planner.routing.types import CachedTokens, Choice, NothingCached
from isthmus_planner.routing.view import View
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.route import RouteRequest

NOTHING_CACHED = NothingCached()


def choose(
    request: RouteRequest,
    view: View,
    known: Callable[[], Known],
    planner: Incarnation,
    now_s: float,
    cached: CachedTokens = NOTHING_CACHED,
    weighings: list[Weighing] | None = None,
) -> Choice:
    """The best that can be done now, whether or not it meets the request's targets; raises the typed refusal if
    nobody can take it at all. `weighings`: a list for what was weighed, if somebody wants to know."""
    ask = asked(request, view, cached, now_s)
    picked = _resuming(ask, request, view) or pick(ask, request.exclude, view, request.model, now_s, weighings)
    if picked is None:
        raise refusal(request, view, known())
    return choice_of(request, picked, view.policy, planner)


def asked(request: RouteRequest, view: View, cached: CachedTokens = NOTHING_CACHED, now_s: float = 0.0) -> Ask:
    held = cached.cached_tokens(request.prefix) if request.prefix else NOTHING_CACHED.cached_tokens(())
    return ask_of(request, view.policy, held, view.usual_osl_tokens(request.model), now_s)


def pick(
    ask: Ask,
    exclude: tuple[Incarnation, ...],
    view: View,
    model: str,
    now_s: float,
    weighings: list[Weighing] | None = None,
) -> Picked | None:
    groups = view.groups(model)
    mode = view.policy.mode
    pair: Picked | None = None
    if mode is not ModePolicy.AGGREGATED:
        pair = _cheapest(_pair(ask, exclude, group, view, now_s, weighings) for group in groups)
        if pair is not None and mode is ModePolicy.DISAGGREGATED:
            return pair
    alone = _cheapest(_alone(ask, exclude, group, weighings) for group in groups)
    if alone is None and pair is None and exclude:
        # Nobody else is left. What failed was most often the way between two workers: one of them may still serve the
        # request alone. If it was the worker itself, it answers with that at once.
        alone = _cheapest(_alone(ask, (), group, weighings) for group in groups)
    return _cheapest((pair, alone))


def _resuming(ask: Ask, request: RouteRequest, view: View) -> Picked | None:
    """A decode worker that can fetch the KV that is staged, and has only the tokens after it to compute."""
    staged = request.staged
    if staged is None or not view.rails.lives(staged.relay):
        return None
    key = (request.model, staged.model_fingerprint, staged.kv_form)
    for group in view.groups(request.model):
        if group.key == key:
            there = {seat.life: staged.tokens for seat in group.decode.seats if seat.beat.relay is not None}
            without_relay = tuple(seat.life for seat in group.decode.seats if seat.beat.relay is None)
            resumed = replace(ask, cached=there)
            picked = _alone(resumed, (*request.exclude, *without_relay), group)
            return None if picked is None else replace(picked, staged=True)
    return None


def _cheapest(found: Iterable[Picked | None]) -> Picked | None:
    """The first of the least."""
    best: Picked | None = None
    for picked in found:
        if picked is not None and (best is None or picked.cost_s < best.cost_s):
            best = picked
    return best


def _pair(
    ask: Ask,
    exclude: tuple[Incarnation, ...],
    group: Group,
    view: View,
    now_s: float,
    weighings: list[Weighing] | None,
) -> Picked | None:
    first, second = group.prefill, group.decode
    if not first.seats or not second.seats:
        return None
    prefill, decode = first.costs(ask), second.pair_costs(ask)
    first.strike(prefill, ask.tokens, exclude)
    second.strike(decode, ask.tokens, exclude)
    size_bytes = group.crossing_bytes(ask.tokens)
    if min(first.staging) < size_bytes:
        room_s = ask.weights.room_s
        prefill = [
            cost if size_bytes <= free else cost + room_s for cost, free in zip(prefill, first.staging, strict=True)
        ]
    rails = _Crossings(ask, group, view, now_s)
    if weighings is not None:
        weighings.append(Weighing(ask, second.seats, decode, first.seats, prefill, rails))
    share, base_s = ask.weights.transfer * size_bytes, ask.weights.transfer * view.rails.base_s
    sent = [cost + (base_s + share * s) for cost, s in zip(prefill, first.out, strict=True)]
    received = [cost + (base_s + share * s) for cost, s in zip(decode, second.inn, strict=True)]
    found = best_pair(PairCosts(prefill, decode, sent, received, rails.cost))
    if found is None:
        return None
    i, j, cost_s = found
    return Picked(ask, cost_s, first.seats[i], second.seats[j], rails.crossing(i, j))


class _Crossings:
    """Of one request's KV, between any two of a group."""

    __slots__ = ("_ask", "_base_s", "_bounded", "_group", "_inn", "_now_s", "_out", "_size_bytes", "_view")

    def __init__(self, ask: Ask, group: Group, view: View, now_s: float) -> None:
        self._ask, self._group, self._view, self._now_s = ask, group, view, now_s
        self._out, self._inn = group.prefill.out, group.decode.inn
        self._base_s, self._size_bytes = view.rails.base_s, group.crossing_bytes(ask.tokens)
        self._bounded = group.size is not None and view.rails.bounded(now_s)

    def transfer_s(self, i: int, j: int) -> float:
        slowest, received = self._out[i], self._inn[j]
        if received > slowest:
            slowest = received
        if self._bounded:
            prefill, decode = self._group.prefill.seats[i], self._group.decode.seats[j]
            slowest = max(slowest, self._view.ceiling_s_per_byte(self._group, prefill, decode, self._now_s))
        return self._base_s + self._size_bytes * slowest

    def crossing(self, i: int, j: int) -> Crossing:
        return Crossing(self.transfer_s(i, j), staged=self.staged(i))

    def staged(self, i: int) -> bool:
        return self._size_bytes <= self._group.prefill.staging[i]

    def cost(self, i: int, j: int) -> float:
        """What only the pair as such costs: the crossing, and what it does to the mean ITL."""
        ask, seat = self._ask, self._group.decode.seats[j]
        if self._group.prefill.seats[i] is seat:
            return NEVER
        seconds = self.transfer_s(i, j)
        cost = ask.weights.transfer * seconds
        if ask.itl_target_s is not None:
            held_s = seat.wait_s(ask.now_s)
            over = targets.itl_over_s(ask, seat, seconds + held_s)
            over_alone = targets.itl_over_s(ask, seat, held_s)
            cost += targets.missed_s(ask, over, ask.osl_tokens) - targets.missed_s(ask, over_alone, ask.osl_tokens)
        return cost


def _alone(
    ask: Ask, exclude: tuple[Incarnation, ...], group: Group, weighings: list[Weighing] | None = None
) -> Picked | None:
    workers = group.decode
    if not workers.seats:
        return None
    decode = workers.alone_costs(ask, group.alone.first_s(ask))
    costs = [a + b for a, b in zip(group.alone.costs(ask), decode, strict=True)]
    workers.strike(costs, ask.tokens, exclude)
    if weighings is not None:
        weighings.append(Weighing(ask, workers.seats, costs))
    j = least(costs)
    return None if j is None else Picked(ask, costs[j], None, workers.seats[j])
