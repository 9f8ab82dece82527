"""Room for the prompt's KV, and load as the last word between equals."""

from __future__ import annotations

from isthmus_planner.routing.ask import Ask, Crossing
from isthmus_planner.routing.seat import Seat


def has_room(ask: Ask, decode: Seat) -> bool:
    """For the prompt and its first token, in whole blocks."""
    return ask.tokens < decode.free_tokens


def no_room_s(ask: Ask, decode: Seat) -> float:
    return 0.0 if has_room(ask, decode) else ask.weights.room_s


def no_staging_s(ask: Ask, crossing: Crossing) -> float:
    """The prompt's KV does not fit into what the prefill node's staging pool has free."""
    return 0.0 if crossing.staged else ask.weights.room_s


def load_s(ask: Ask, seat: Seat) -> float:
    return ask.weights.load_s * seat.load
