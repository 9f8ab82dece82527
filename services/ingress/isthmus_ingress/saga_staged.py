"""KV that a request has staged somewhere, and a sequence on the move: what a saga keeps to go on elsewhere (ADR 9)."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_ingress.saga_parties import Attempt, Ended, Party
from isthmus_shared.errors import DeadlineExceeded, IsthmusError, PartyLost, Unavailable
from isthmus_shared.ids import Generation
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.route import Route
from isthmus_shared.messages.work import KvTicket

MOVE_S = 12.0
"""From the wish to move a sequence until it has left its worker: a route, a worker's answer, a long context's copy.
What has not happened by then will not: another wish may come."""


@dataclass(slots=True)
class Staged:
    ticket: KvTicket
    """Its `pull` is that of the next attempt to fetch it."""
    producer: Party
    """Whoever staged it, and would free it."""


@dataclass(slots=True)
class Move:
    source: Party
    """The decode worker that gives the sequence away."""
    generation: Generation
    """Of the question for a route, of the moved KV, and of the attempt that it leads to."""
    until_s: float
    route: Route | None = None
    ticket: KvTicket | None = None


def staged_by(attempt: Attempt, *, doubtful: bool) -> Staged | None:
    """What a failed attempt leaves for the next one: KV that is sealed, unless it was what failed (`doubtful`)."""
    producer, ticket = attempt.parties.get(Role.PREFILL), attempt.ticket
    if doubtful or producer is None or ticket is None:
        return None
    sealed = producer.handed_off or producer.ended is Ended.CONSUMED
    if not sealed or producer.ended not in (None, Ended.CONSUMED, Ended.GONE):
        return None
    asked = Role.DECODE in attempt.parties
    return Staged(ticket.model_copy(update={"pull": ticket.pull + asked}), producer)


def blames_kv(refusal: IsthmusError) -> bool:
    """Whether a decode worker's refusal of a ticket may be the ticket's fault. A worker that is full, gone, draining or
    silent says nothing of it."""
    return not isinstance(refusal, Unavailable | DeadlineExceeded | PartyLost)
