"""What is missed by a plan: the request's own targets, and those of everyone on its decode worker."""

from __future__ import annotations

from isthmus_planner.routing.ask import Ask
from isthmus_planner.routing.scorers.residents import SHARED
from isthmus_planner.routing.scorers.ttft import ttft_s
from isthmus_planner.routing.seat import Seat


def ttft_over_s(ask: Ask, prefill: Seat) -> float:
    """Beyond the target; at most 0 when it is met."""
    return 0.0 if ask.ttft_left_s is None else ask.margin * ttft_s(ask, prefill) - ask.ttft_left_s


def itl_over_s(ask: Ask, decode: Seat, delay_s: float) -> float:
    """Mean over the answer: what delays the second token once (`pair_delay_s`) delays each by its share."""
    if ask.itl_target_s is None:
        return 0.0
    return ask.margin * (decode.itl_with_s(ask.tokens) + delay_s / ask.osl_tokens) - ask.itl_target_s


def residents_over_s(ask: Ask, decode: Seat, held_s: float) -> float:
    """`held_s`: how long prompts that are there or come with this request hold them up, once."""
    if not decode.targets.count:
        return 0.0
    return ask.margin * (decode.itl_with_s(ask.tokens) + held_s / ask.osl_tokens) - decode.targets.strictest_s


def pair_delay_s(ask: Ask, decode: Seat, transfer_s: float) -> float:
    return transfer_s + decode.wait_s(ask.now_s)


def missed_s(ask: Ask, over_s: float, steps: float = 1.0, requests: int = 1) -> float:
    """Of so many requests, each over by `over_s` in each of so many steps."""
    if over_s <= 0:
        return 0.0
    return requests * (ask.weights.missed_s + ask.weights.excess * steps * over_s)


def pair_missed_s(ask: Ask, prefill: Seat, decode: Seat, transfer_s: float) -> float:
    held_s = decode.wait_s(ask.now_s)
    return _all_s(ask, prefill, decode, transfer_s + held_s, held_s)


def alone_missed_s(ask: Ask, worker: Seat) -> float:
    """Its prompt, and those before it, hold up who is there; its own decoding comes after them."""
    return _all_s(ask, worker, worker, 0.0, ttft_s(ask, worker))


def _all_s(ask: Ask, prefill: Seat, decode: Seat, delay_s: float, held_s: float) -> float:
    return (
        missed_s(ask, ttft_over_s(ask, prefill))
        + missed_s(ask, itl_over_s(ask, decode, delay_s), ask.osl_tokens)
        + missed_s(ask, residents_over_s(ask, decode, held_s), SHARED * ask.osl_tokens, decode.targets.count)
    )
