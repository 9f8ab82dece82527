"""What the accelerators' time costs: the whole worker while it prefills, its share of the batch while it decodes."""

from __future__ import annotations

from isthmus_planner.routing.ask import Ask
from isthmus_planner.routing.seat import Seat


def prefill_price_s(ask: Ask, prefill: Seat) -> float:
    dollars = prefill.dollars_per_s * prefill.prefill_s(ask.new_tokens(prefill.life))
    return ask.weights.dollar_s * dollars


def decode_price_s(ask: Ask, decode: Seat) -> float:
    share_s = ask.osl_tokens * decode.itl_with_s(ask.tokens) / (decode.residents + 1)
    return ask.weights.dollar_s * decode.dollars_per_s * share_s
