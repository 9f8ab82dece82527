"""What everyone who is on a worker already loses by this request."""

from __future__ import annotations

from isthmus_planner.routing.ask import Ask
from isthmus_planner.routing.seat import Seat

SHARED = 0.5
"""Of the request's own decoding: the part that a resident, half way through on average, is there for."""


def by_prefill_s(ask: Ask, prefill: Seat) -> float:
    """Sequences that decode on the worker that prefills stand still meanwhile (0 on one that does not decode)."""
    return ask.weights.residents * prefill.residents * prefill.prefill_s(ask.new_tokens(prefill.life))


def by_joining_s(ask: Ask, decode: Seat) -> float:
    """Each step is longer by one sequence and its KV, for each of them."""
    longer_s = decode.sequence_s + ask.tokens * decode.kv_token_s
    return ask.weights.residents * SHARED * ask.osl_tokens * decode.residents * longer_s
