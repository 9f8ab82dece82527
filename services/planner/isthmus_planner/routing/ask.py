"""What a request asks of any plan, worked out once for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from isthmus_planner.routing.policy import Policy, Weights
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.route import RouteRequest


@dataclass(frozen=True, slots=True)
class Ask:
    tokens: int
    """Of the prompt."""
    osl_tokens: float
    """Expected of the answer."""
    ttft_left_s: float | None
    """Of its target, after what it has waited; None: no target. May be below 0."""
    itl_target_s: float | None
    cached: Mapping[Incarnation, int]
    """Tokens of the prompt in prefix caches."""
    margin: float
    """`Policy.slo_margin`."""
    weights: Weights
    now_s: float = 0.0
    """When it is asked, on the view's clock: queues have become shorter since the beats that told of them."""

    def new_tokens(self, life: Incarnation) -> int:
        """To compute there: at least one, since the first token comes from it."""
        return max(1, self.tokens - self.cached.get(life, 0))


@dataclass(frozen=True, slots=True)
class Crossing:
    """Of one pair, now."""

    transfer_s: float
    staged: bool = True
    """Whether the prefill side has room to stage it at once."""


NO_CROSSING = Crossing(0.0)


def ask_of(
    request: RouteRequest,
    policy: Policy,
    cached: Mapping[Incarnation, int],
    usual_osl_tokens: float,
    now_s: float = 0.0,
) -> Ask:
    slo = request.slo
    left_s = None if slo is None or slo.ttft_s is None else slo.ttft_s - request.waited_s
    return Ask(
        tokens=request.isl_tokens,
        osl_tokens=min(float(request.max_osl_tokens), usual_osl_tokens),
        ttft_left_s=left_s,
        itl_target_s=None if slo is None else slo.itl_s,
        cached=cached,
        margin=policy.slo_margin,
        weights=policy.weights,
        now_s=now_s,
    )
