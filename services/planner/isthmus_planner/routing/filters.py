"""Who may serve a request, and of those who may not, why. Each is pure; the first that takes a worker out names it."""

from __future__ import annotations

from isthmus_planner.routing.columns import limit_tokens
from isthmus_planner.routing.seat import Seat
from isthmus_shared.messages.health import ProcessState, Role
from isthmus_shared.messages.route import RouteRequest


def why_unable(seat: Seat, request: RouteRequest) -> str | None:
    """The filter that keeps this worker from any part in the request, in words; None if none does."""
    beat = seat.beat
    if beat.model != request.model:
        return "serves another model"
    if beat.state is not ProcessState.READY:
        return f"is {beat.state.value}"
    if beat.incarnation in request.exclude:
        return "has just failed this request"
    if request.isl_tokens >= beat.max_model_len_tokens:
        return f"has a context of {beat.max_model_len_tokens} tokens"
    if request.isl_tokens > limit_tokens(seat):
        return "has too small a KV cache"
    return None


def why_no_pair(prefill: Seat, decode: Seat) -> str | None:
    """What keeps these two from exchanging KV; None if nothing does."""
    first, second = prefill.beat, decode.beat
    if first.worker_id == second.worker_id:
        return "is the same worker"
    if first.model_fingerprint != second.model_fingerprint:
        return "has other weights than its peer"
    if first.kv_form != second.kv_form:
        return "has another KV form than its peer"
    if first.relay is None or second.relay is None:
        return "has no relay"
    return None


def prefills(seat: Seat) -> bool:
    return Role.PREFILL in seat.beat.roles


def decodes(seat: Seat) -> bool:
    return Role.DECODE in seat.beat.roles
