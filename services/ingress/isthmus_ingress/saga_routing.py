"""How long a saga goes on asking for a route. Waiting for one costs no attempt: an attempt is a submit to a worker."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_shared.errors import IsthmusError, Retry

ROUTE_RETRY_S = 0.5
"""Between a refusal and the next question: one heartbeat, so that the planner's view has moved."""
FIRST_ROUTE_TRIES = 2
"""Of a request that nobody has begun: another planner may live, but its client is better told soon to come back."""


@dataclass(slots=True)
class RouteWait:
    """From the moment that a route is wanted until one is taken."""

    patience_s: float
    """For a re-plan: a worker that crashed is started again meanwhile, and its client may have read half an answer."""
    since_s: float = 0.0
    refusals: int = 0
    again_at_s: float | None = None
    """When to ask again; None while a question is under way."""

    def begin(self, now_s: float) -> None:
        self.since_s, self.refusals, self.again_at_s = now_s, 0, None

    def refused(self, error: IsthmusError, *, first: bool, now_s: float) -> bool:
        """Whether to ask again, at `again_at_s`. `first`: no worker has been asked for anything yet."""
        self.refusals += 1
        patient = self.refusals < FIRST_ROUTE_TRIES if first else now_s < self.since_s + self.patience_s
        if error.retry is Retry.NEVER or not patient:
            return False
        self.again_at_s = now_s + ROUTE_RETRY_S
        return True
