"""The request's own wait for its first token: the queue, and the part of its prompt that is in no cache."""

from __future__ import annotations

from isthmus_planner.routing.ask import Ask
from isthmus_planner.routing.seat import Seat


def ttft_s(ask: Ask, prefill: Seat) -> float:
    """Seconds, p50. The first token does not wait for the crossing."""
    return prefill.base_s + prefill.wait_s(ask.now_s) + prefill.prefill_s(ask.new_tokens(prefill.life))


def saved_s(ask: Ask, prefill: Seat) -> float:
    """What the prefix cache there spares; in `ttft_s` already."""
    return prefill.prefill_s(ask.tokens) - prefill.prefill_s(ask.new_tokens(prefill.life))
