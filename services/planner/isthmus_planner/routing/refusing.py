"""Why there is no route, in words and as a typed error. Only a request that is refused pays for this: O(workers)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from isthmus_planner.routing.filters import decodes, prefills, why_no_pair, why_unable
from isthmus_planner.routing.policy import ModePolicy
from isthmus_planner.routing.seat import Seat
from isthmus_planner.routing.view import View
from isthmus_shared.errors import ContextTooLong, IsthmusError, ModelNotFound, Unavailable
from isthmus_shared.messages.health import ProcessState
from isthmus_shared.messages.route import RouteRequest

RETRY_STARTING_S = 1.0
"""Two heartbeats: by then a worker that was about to be ready is."""
RETRY_GONE_S = 5.0
"""Somebody must start a worker first."""
PEERS_LOOKED_AT = 8
"""For each worker: why it finds no peer is the same for most of them."""


@dataclass(frozen=True, slots=True)
class Known:
    """What a planner knows beyond the living workers."""

    models: frozenset[str]
    """Every model name seen, its workers alive or not."""
    warm: bool
    """False in a planner so young that it may not have heard everyone yet."""


def refusal(request: RouteRequest, view: View, known: Known) -> IsthmusError:
    of_model = [seat for group in view.groups(request.model) for seat in group.seats.values()]
    if not of_model:
        return _refuse_model(request, known)
    longest = max(seat.beat.max_model_len_tokens for seat in of_model)
    if request.isl_tokens >= longest:
        return ContextTooLong(
            f"the prompt has {request.isl_tokens} tokens",
            why=f"model {request.model!r} takes at most {longest} tokens, output included",
            todo="send a shorter prompt",
            param="prompt",
        )
    why = in_words(removed(request, list(view.seats()), view.policy.mode))
    if any(seat.beat.state is ProcessState.READY for seat in of_model):
        return Unavailable(  # not a matter of load: nobody who could take it is there
            f"no worker can take this request for model {request.model!r}",
            why=why,
            todo="try again, or start another worker",
            retry_after_s=RETRY_STARTING_S,
        )
    return Unavailable(
        f"no worker for model {request.model!r} is ready",
        why=why,
        todo="try again",
        retry_after_s=RETRY_STARTING_S,
    )


def removed(request: RouteRequest, seats: list[Seat], mode: ModePolicy) -> Counter[str]:
    """How many workers and pairs each filter takes out."""
    counts: Counter[str] = Counter()
    able: list[Seat] = []
    for seat in seats:
        reason = why_unable(seat, request)
        if reason is None:
            able.append(seat)
        else:
            counts[reason] += 1
    prefillers, decoders = [s for s in able if prefills(s)], [s for s in able if decodes(s)]
    if not decoders and able:
        counts["has no decode role"] += len(able)
    if mode is not ModePolicy.AGGREGATED:
        for first in prefillers:
            for second in decoders[:PEERS_LOOKED_AT]:
                reason = why_no_pair(first, second)
                if reason is not None:
                    counts[reason] += 1
    return counts


def _refuse_model(request: RouteRequest, known: Known) -> IsthmusError:
    if request.model in known.models:
        return Unavailable(
            f"no worker for model {request.model!r} is alive",
            todo="start one, or try again",
            retry_after_s=RETRY_GONE_S,
        )
    if not known.warm:
        return Unavailable("the planner has just started", todo="try again", retry_after_s=RETRY_STARTING_S)
    names = ", ".join(sorted(known.models)) or "none"
    return ModelNotFound(f"the model {request.model!r} does not exist", todo=f"known models: {names}", param="model")


def in_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in sorted(counts.items())) or "no worker has the role"
