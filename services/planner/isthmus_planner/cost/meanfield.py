"""A closed loop of clients on one aggregated replica, in closed form: what a benchmark of it would measure.

`clients` requests are always under way; each is prefilled and decoded on the same accelerators. By Little's law they
divide between admission, prefill and decode in the ratio of the times that they spend there, and every prompt that is
prefilled holds up everyone who decodes. Pure; arguments may be floats or NumPy arrays of one shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isthmus_planner.cost.constants import Constants
from isthmus_planner.cost.laws import DecodeLaw, PrefillLaw, Real

ROUNDS = 12
"""Of finding the batch. A step depends little on it: each round takes the error down by a factor of three or more."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Of the typical request. Seconds; rates are the whole replica's."""

    itl_s: Real
    """Of a step without a prefill in it."""
    tpot_s: Real
    """Mean time between a request's tokens, the prefills of others included."""
    ttft_s: Real
    e2el_s: Real
    requests_per_s: Real
    batch: Real
    """Sequences that decode at once, on average."""


def closed_loop(
    decode: DecodeLaw,
    prefill: PrefillLaw,
    constants: Constants,
    clients: Real,
    isl_tokens: Real,
    osl_tokens: Real,
    *,
    max_kv_tokens: Real = np.inf,
) -> ClosedLoop:
    """`max_kv_tokens` (`memory.fit`) bounds the batch: clients beyond it wait for room before their first token.

    With f the time to the first token, S = steps · τ, and W = (clients - 1) times what one prefill takes from everyone,
    the time E from request to end has E = f + S / (1 - W / E): a quadratic. An engine computes at most one prompt a
    step, so tokens are never further apart than a step and a prefill; where that binds, prompts queue instead.
    """
    steps = np.maximum(osl_tokens - 1.0, 1.0)
    context = isl_tokens + osl_tokens / 2
    seats = np.minimum(clients, np.maximum(max_kv_tokens / (isl_tokens + osl_tokens), 1.0))
    work_s = prefill.work_s(isl_tokens)
    taken_s = constants.interference * (prefill.base_s + work_s)
    batch = 1.0 * seats
    for _ in range(ROUNDS):
        step_s = decode.step_s(np.maximum(batch, 1.0), batch * context)
        first_s = prefill.base_s + work_s + constants.admission_steps * step_s
        others_s = (seats - 1.0) * taken_s
        half = (first_s + steps * step_s + others_s) / 2
        seated_s = half + np.sqrt(half * half - first_s * others_s)
        tpot_s = np.minimum((seated_s - first_s) / steps, step_s + taken_s)
        seated_s = np.maximum(seated_s, seats * (step_s + taken_s) * (tpot_s >= step_s + taken_s))
        rate = seats / seated_s
        batch = rate * steps * tpot_s
    e2el_s = clients / rate
    return ClosedLoop(step_s, tpot_s, e2el_s - steps * tpot_s, e2el_s, rate, batch)
