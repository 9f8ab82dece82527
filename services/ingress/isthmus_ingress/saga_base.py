"""What a saga keeps, and how its attempts begin and end. What the events do is in `saga`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from isthmus_ingress.saga_parties import MIN_DEADLINE_S, Attempt, Ended, Flow, Party, check_saga
from isthmus_ingress.saga_routing import RouteWait
from isthmus_ingress.saga_staged import Move, Staged, staged_by
from isthmus_ingress.saga_types import (
    AskRoute,
    CancelReason,
    Effect,
    End,
    Noted,
    Replanned,
    SagaState,
    SendCancel,
    SendRelease,
    Submit,
    WorkerGone,
)
from isthmus_shared.errors import Cancelled, IsthmusError, PartyLost, Retry
from isthmus_shared.ids import Generation, Incarnation
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.route import Route
from isthmus_shared.messages.work import FinishReason, KvTicket, WorkerRef

MAX_EXCLUDED = 64
"""As many lives as RouteRequest carries."""

_OVER = (SagaState.DONE, SagaState.FAILED)


@dataclass(slots=True)
class SagaBase:
    """`max_tokens` counts output over all attempts; `deadline_s` is the request's own, as a time on `now_s`'s clock.

    `route_patience_s`: how long a re-plan waits for a route.
    """

    max_tokens: int
    deadline_s: float
    max_attempts: int
    route_patience_s: float
    state: SagaState = SagaState.QUEUED
    generation: Generation = field(default=Generation(0))
    attempts: int = 0
    """Routes that led to a submit; not those of moves."""
    output: array[int] = field(default_factory=lambda: array("Q"))
    """Eight bytes a token, for as long as the stream lasts; as a list it would be forty."""
    excluded: list[Incarnation] = field(default_factory=list)
    error: IsthmusError | None = None
    wake_at_s: float = 0.0
    """When a Tick is due unless an event moves it."""
    flow: Flow | None = None
    """Takes the usual next tokens, instead of `handle`."""
    _attempt: Attempt | None = None
    _staged: Staged | None = None
    """While no attempt has it: KV that the next one may fetch."""
    _move: Move | None = None
    _parties: dict[tuple[Generation, Role], Party] = field(default_factory=dict)
    _gone: dict[Incarnation, WorkerGone] = field(default_factory=dict)
    _wait: RouteWait = field(init=False)
    _effects: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._wait = RouteWait(self.route_patience_s)

    @property
    def over(self) -> bool:
        return self.state in _OVER

    @property
    def moving(self) -> bool:
        """Whether its sequence is being moved."""
        return self._move is not None

    def decodes_on(self, life: Incarnation) -> bool:
        """Whether its tokens come from that worker now."""
        decode = None if self._attempt is None else self._attempt.parties.get(Role.DECODE)
        return decode is not None and decode.ended is None and decode.worker.incarnation == life

    # Routes

    def _want_route(self, now_s: float) -> None:
        self._wait.begin(now_s)
        self._ask_route()

    def _ask_route(self) -> None:
        self._wait.again_at_s = None
        self.generation = Generation(self.generation + 1)
        self.state = SagaState.QUEUED
        self._attempt = self.flow = None
        ticket = None if self._staged is None else self._staged.ticket
        self._effects.append(AskRoute(self.generation, tuple(self.excluded[-MAX_EXCLUDED:]), ticket))

    def _asking(self, generation: Generation) -> bool:
        """Whether that question for a route is the one whose answer is waited for."""
        return self.state is SagaState.QUEUED and generation == self.generation and self._wait.again_at_s is None

    def _on_lost_route(self, worker: WorkerRef, now_s: float) -> None:
        """The planner does not know yet what we know: say so, and once it has been told, give it time."""
        if worker.incarnation in self.excluded:
            why = self._gone[worker.incarnation].why
            self._no_route(PartyLost("the route names a lost worker", why=why), now_s)
        else:
            self.excluded.append(worker.incarnation)
            self._ask_route()

    def _no_route(self, error: IsthmusError, now_s: float) -> None:
        self.error = error
        if not self._wait.refused(error, first=self.attempts == 0, now_s=now_s):
            self._fail(error, "replanned")

    # Attempts

    def _begin(self, route: Route, now_s: float) -> None:
        """From the prompt and the tokens so far."""
        self._drop_staged()
        self.state = SagaState.PREFILLING
        self._attempt = Attempt(route=route, submitted_at_s=now_s, offset=len(self.output), parties={})
        prefill = route.prefill
        # One worker in both roles is an aggregated request: it would only send itself its own KV.
        if prefill is not None and prefill.incarnation != route.decode.incarnation:
            self._submit(Role.PREFILL, prefill, None, now_s)
        else:
            self._submit(Role.DECODE, route.decode, None, now_s)

    def _resume(self, route: Route, staged: Staged, now_s: float) -> None:
        """From KV that is staged, and the tokens so far."""
        self._staged, self.flow = None, None
        self.state = SagaState.CROSSING
        self._attempt = Attempt(
            route=route,
            submitted_at_s=now_s,
            offset=len(self.output),
            parties={Role.PREFILL: staged.producer},
            ticket=staged.ticket,
            start_sent=True,
            resumed=True,
        )
        self._submit(Role.DECODE, route.decode, staged.ticket, now_s)

    def _submit(self, role: Role, worker: WorkerRef, ticket: KvTicket | None, now_s: float) -> None:
        attempt, left_s = self._attempt, self.deadline_s - now_s
        assert attempt is not None
        attempt.parties[role] = self._parties[self.generation, role] = Party(role, worker, self.generation)
        output, deadline_s = tuple(self.output[: attempt.offset]), attempt.worker_deadline_s(left_s)
        retain_s = max(left_s, MIN_DEADLINE_S) if role is Role.PREFILL else 0.0
        self._effects.append(Submit(role, worker, self.generation, output, ticket, deadline_s, retain_s))

    def _fail_attempt(
        self, error: IsthmusError, exclude: Incarnation | None, now_s: float, *, doubtful: bool = False
    ) -> None:
        """`doubtful`: the KV that was to be fetched may be to blame."""
        if exclude is not None and exclude not in self.excluded:
            self.excluded.append(exclude)
        if isinstance(error, Cancelled):  # a worker's word for "I am stopping": nobody here asked for it
            error = PartyLost("a worker ended the request unasked", why=error.text)
        if error.retry is Retry.NEVER or self.attempts >= self.max_attempts:
            self._fail(error, "replanned")
            return
        if now_s >= self.deadline_s:
            self._fail(error, "deadline")
            return
        self.error = error
        if self._attempt is not None:
            self._staged = staged_by(self._attempt, doubtful=doubtful)
        self._let_go("replanned")
        if len(self.output) >= self.max_tokens:
            self._done(FinishReason.LENGTH)
            return
        self._want_route(now_s)
        self._effects.append(Replanned(self.generation, error))

    def _done(self, finish: FinishReason) -> None:
        self.state = SagaState.DONE
        self._let_go("finished")
        self._drop_staged("finished")
        self._effects.append(End(finish, None))

    def _fail(self, error: IsthmusError, reason: CancelReason) -> None:
        self.state, self.error = SagaState.FAILED, error
        self._let_go(reason)
        self._drop_staged(reason)
        self._effects.append(End(None, error))

    def _stay(self) -> None:
        """The sequence is not moved after all; it goes on where it is, or as if it had never been asked to move."""
        if self._move is not None:
            self._move = None
            self._effects.append(Noted("stayed"))

    # Parties

    def _let_go(self, reason: CancelReason) -> None:
        """End the attempt: everybody but the one whose KV is kept."""
        self._stay()
        kept = None if self._staged is None else self._staged.producer
        for party in self._attempt.parties.values() if self._attempt is not None else ():
            if party is not kept:
                self._end_party(party, reason)
        self._attempt = self.flow = None
        self._wait.again_at_s = None

    def _drop_staged(self, reason: CancelReason = "replanned") -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            self._end_party(staged.producer, reason)

    def _end_party(self, party: Party, reason: CancelReason) -> None:
        if party.ended is None:
            party.ended, party.reason = Ended.CANCELLED, reason
            self._effects.append(SendCancel(party.worker, party.generation, reason))
        elif party.ended is Ended.CONSUMED:
            party.ended = Ended.RELEASED
            self._effects.append(SendRelease(party.worker, party.generation))

    def _current(self, party: Party) -> bool:
        attempt = self._attempt
        return attempt is not None and not self.over and any(party is ours for ours in attempt.parties.values())

    def check_invariants(self) -> None:
        kept = None if self._staged is None else self._staged.producer
        check_saga(self.state, self._attempt, kept, self._parties.values())
        assert len(self.output) <= self.max_tokens
        assert self.attempts <= min(self.generation, self.max_attempts)
        assert self.flow is None or self.flow.attempt is self._attempt
        assert self._staged is None or self._attempt is None
        assert self._move is None or self._current(self._move.source)
