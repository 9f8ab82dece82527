"""What is told of a plan: its predictions, its deadlines, and how far it is from the targets. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_planner.routing.ask import NO_CROSSING, Ask, Crossing
from isthmus_planner.routing.policy import Policy
from isthmus_planner.routing.scorers import targets
from isthmus_planner.routing.scorers.room import has_room
from isthmus_planner.routing.scorers.ttft import ttft_s
from isthmus_planner.routing.seat import Seat
from isthmus_planner.routing.types import Choice
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.route import Mode, Prediction, RouteRequest


def prediction_of(ask: Ask, prefill: Seat, decode: Seat, transfer_s: float | None) -> Prediction:
    delay_s = 0.0 if transfer_s is None else targets.pair_delay_s(ask, decode, transfer_s)
    first_s, itl_s = ttft_s(ask, prefill), decode.itl_with_s(ask.tokens) + delay_s / ask.osl_tokens
    return Prediction(
        ttft_p50_s=first_s,
        ttft_p90_s=first_s * prefill.prefill_spread,
        itl_p50_s=itl_s,
        itl_p90_s=itl_s * decode.decode_spread,
        calibrated=prefill.prefill_told and decode.decode_told,
        cached_tokens=ask.tokens - ask.new_tokens(prefill.beat.incarnation),
        transfer_s=transfer_s,
    )


@dataclass(frozen=True, slots=True)
class Picked:
    """The cheapest plan of some kind."""

    ask: Ask
    cost_s: float
    prefill: Seat | None
    decode: Seat
    crossing: Crossing = NO_CROSSING
    staged: bool = False
    """`decode` fetches KV that is there already; nobody prefills it."""


def choice_of(request: RouteRequest, picked: Picked, policy: Policy, planner: Incarnation) -> Choice:
    ask, prefill, decode, crossing = picked.ask, picked.prefill, picked.decode, picked.crossing
    first, transfer_s = decode if prefill is None else prefill, crossing.transfer_s
    predicted = prediction_of(ask, first, decode, None if prefill is None else transfer_s)
    ttft_over_s = max(0.0, targets.ttft_over_s(ask, first))
    held_s = ttft_s(ask, first) if prefill is None else decode.wait_s(ask.now_s)
    delay_s = 0.0 if prefill is None else targets.pair_delay_s(ask, decode, transfer_s)
    itl_over_s = max(0.0, targets.itl_over_s(ask, decode, delay_s))
    residents_over_s = max(0.0, targets.residents_over_s(ask, decode, held_s))
    room = has_room(ask, decode)
    wait_s = ttft_over_s
    if not room or itl_over_s > 0 or residents_over_s > 0:
        wait_s = max(wait_s, until_one_ends_s(ask, decode))
    return Choice(
        request=request,
        mode=Mode.AGGREGATED if prefill is None and not picked.staged else Mode.DISAGGREGATED,
        prefill=prefill,
        decode=decode,
        predicted=predicted,
        deadlines=policy.deadlines.for_prediction(predicted, transfer_s),
        score_s=picked.cost_s,
        planner=planner,
        ttft_over_s=ttft_over_s,
        itl_over_s=itl_over_s,
        residents_over_s=residents_over_s,
        room=room,
        predicted_wait_s=wait_s,
    )


def until_one_ends_s(ask: Ask, decode: Seat) -> float:
    """Of those who decode there, at random moments of their answers, the next: the mean of the least of so many."""
    return ask.osl_tokens * decode.itl_s / (decode.residents + 1)
