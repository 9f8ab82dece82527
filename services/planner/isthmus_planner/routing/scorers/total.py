"""All scorers of one plan."""

from __future__ import annotations

from isthmus_planner.routing.ask import NO_CROSSING, Ask, Crossing
from isthmus_planner.routing.scorers import itl, price, residents, room, targets, ttft
from isthmus_planner.routing.seat import Seat


def pair_scores(ask: Ask, prefill: Seat, decode: Seat, crossing: Crossing) -> dict[str, float]:
    """Seconds by scorer; the picker compares their sum."""
    return {
        "ttft": ttft.ttft_s(ask, prefill),
        "transfer": ask.weights.transfer * crossing.transfer_s,
        "itl": itl.decoding_s(ask, decode),
        "residents": residents.by_prefill_s(ask, prefill) + residents.by_joining_s(ask, decode),
        "held_up": itl.held_up_s(ask, decode),
        "room": room.no_room_s(ask, decode) + room.no_staging_s(ask, crossing),
        "targets": targets.pair_missed_s(ask, prefill, decode, crossing.transfer_s),
        "price": price.prefill_price_s(ask, prefill) + price.decode_price_s(ask, decode),
        "load": room.load_s(ask, prefill) + room.load_s(ask, decode),
    }


def alone_scores(ask: Ask, worker: Seat) -> dict[str, float]:
    """Aggregated: nothing crosses, and its prompt's queue is its own."""
    scores = pair_scores(ask, worker, worker, NO_CROSSING)
    missed_s = targets.alone_missed_s(ask, worker)
    return {**scores, "held_up": 0.0, "targets": missed_s, "load": room.load_s(ask, worker)}
