"""The request's own decoding: every expected token at the pace of the batch that it joins."""

from __future__ import annotations

from isthmus_planner.routing.ask import Ask
from isthmus_planner.routing.seat import Seat


def decoding_s(ask: Ask, decode: Seat) -> float:
    return ask.weights.itl * ask.osl_tokens * decode.itl_with_s(ask.tokens)


def held_up_s(ask: Ask, decode: Seat) -> float:
    """Prompts queued on a decode worker hold up its steps, whoever prefills this one."""
    return decode.wait_s(ask.now_s)
