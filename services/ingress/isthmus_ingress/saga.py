"""One request's state machine (ADR 1): events in, effects out. No clock, socket, log or randomness.

    QUEUED ─route─▶ PREFILLING ─ticket─▶ CROSSING ─first token─▶ DECODING ─finish─▶ DONE
       ▲                │                    │                      │
       └──────────── re-plan: generation + 1 ┴──────────────────────┘      any ─▶ FAILED

Rules that hold whatever the order of events:

* each output token is delivered once and in order, over all attempts;
* each party that was asked for work gets exactly one end: its own terminal event, its refusal, its death, the
  decode side's first token (for staged KV), or a Cancel. A party that accepts after it was cancelled is cancelled
  again, since the Cancel may have overtaken the work;
* after `End` nothing is delivered, and no party is left without an end;
* every question for a route has a generation of its own, but only one that led to a submit counts as an attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from isthmus_ingress.saga_parties import RESYNC_S, Attempt, Ended, Flow, Party, check_saga
from isthmus_ingress.saga_routing import RouteWait
from isthmus_ingress.saga_types import (
    Answered,
    AskRoute,
    Begin,
    BusBack,
    Call,
    CancelReason,
    ClientGone,
    Deliver,
    Effect,
    End,
    Event,
    Output,
    Replanned,
    Routed,
    RouteFailed,
    SagaState,
    SendCancel,
    Start,
    StepBroke,
    StopFound,
    Submit,
    Tick,
    WorkerGone,
)
from isthmus_shared.errors import (
    BusDisconnected,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    IsthmusError,
    PartyLost,
    ProtocolViolation,
    Retry,
    TransferFailed,
)
from isthmus_shared.ids import Generation, Incarnation
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.route import Mode
from isthmus_shared.messages.work import FinishReason, KvTicket, SequenceEvent, WorkerRef

MAX_EXCLUDED = 64
"""As many lives as RouteRequest carries."""

_OVER = (SagaState.DONE, SagaState.FAILED)


@dataclass(slots=True)
class Saga:
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
    """Routes that led to a submit."""
    output: list[int] = field(default_factory=list)
    excluded: list[Incarnation] = field(default_factory=list)
    error: IsthmusError | None = None
    wake_at_s: float = 0.0
    """When a Tick is due unless an event moves it."""
    flow: Flow | None = None
    """Takes the usual next tokens, instead of `handle`."""
    _attempt: Attempt | None = None
    _parties: dict[tuple[Generation, Role], Party] = field(default_factory=dict)
    _gone: dict[Incarnation, WorkerGone] = field(default_factory=dict)
    _wait: RouteWait = field(init=False)
    _effects: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._wait = RouteWait(self.route_patience_s)

    @property
    def over(self) -> bool:
        return self.state in _OVER

    def handle(self, event: Event, *, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        self._effects = effects
        match event:
            case Output():
                self._on_output(event, now_s)
            case Begin():
                self._want_route(now_s)
            case Routed():
                self._on_routed(event, now_s)
            case RouteFailed():
                self._on_route_failed(event, now_s)
            case Answered():
                self._on_answered(event, now_s)
            case WorkerGone():
                self._on_worker_gone(event, now_s)
            case BusBack():
                if self._attempt is not None:
                    self._attempt.resync_by_s = now_s + RESYNC_S
            case Tick():
                self._on_tick(now_s)
            case StopFound():
                if not self.over:
                    self._done(FinishReason.STOP)
            case StepBroke() if not self.over:
                self._fail(event.error, "replanned")
            case ClientGone() if not self.over:
                self._fail(Cancelled("the client left"), "client_gone")
        self.wake_at_s = self._next_wake_s()
        return effects

    # Routing

    def _want_route(self, now_s: float) -> None:
        self._wait.begin(now_s)
        self._ask_route()

    def _ask_route(self) -> None:
        self._wait.again_at_s = None
        self.generation = Generation(self.generation + 1)
        self.state = SagaState.QUEUED
        self._attempt = self.flow = None
        self._effects.append(AskRoute(self.generation, tuple(self.excluded[-MAX_EXCLUDED:])))

    def _on_routed(self, event: Routed, now_s: float) -> None:
        if not self._asking(event.generation):
            return
        route = event.route
        prefill = route.prefill if route.mode is Mode.DISAGGREGATED else None
        if route.mode is Mode.DISAGGREGATED and prefill is None:
            self._fail(ProtocolViolation("a disaggregated route names no prefill worker"), "replanned")
            return
        for worker in (prefill, route.decode):
            if worker is not None and worker.incarnation in self._gone:
                self._on_lost_route(worker, now_s)
                return
        self.state = SagaState.PREFILLING
        self.attempts += 1
        self._attempt = Attempt(route=route, submitted_at_s=now_s, offset=len(self.output), parties={})
        # One worker in both roles is an aggregated request: it would only send itself its own KV.
        if prefill is not None and prefill.incarnation != route.decode.incarnation:
            self._submit(Role.PREFILL, prefill, None, now_s)
        else:
            self._submit(Role.DECODE, route.decode, None, now_s)

    def _on_lost_route(self, worker: WorkerRef, now_s: float) -> None:
        """The planner does not know yet what we know: say so, and once it has been told, give it time."""
        if worker.incarnation in self.excluded:
            why = self._gone[worker.incarnation].why
            self._no_route(PartyLost("the route names a lost worker", why=why), now_s)
        else:
            self.excluded.append(worker.incarnation)
            self._ask_route()

    def _submit(self, role: Role, worker: WorkerRef, ticket: KvTicket | None, now_s: float) -> None:
        assert self._attempt is not None
        party = Party(role, worker, self.generation)
        self._attempt.parties[role] = self._parties[self.generation, role] = party
        deadline_s = self._attempt.worker_deadline_s(self.deadline_s - now_s)
        output = tuple(self.output[: self._attempt.offset])
        self._effects.append(Submit(role, worker, self.generation, output, ticket, deadline_s))

    def _on_route_failed(self, event: RouteFailed, now_s: float) -> None:
        if self._asking(event.generation):
            self._no_route(event.error, now_s)

    def _asking(self, generation: Generation) -> bool:
        """Whether that question for a route is the one whose answer is waited for."""
        return self.state is SagaState.QUEUED and generation == self.generation and self._wait.again_at_s is None

    def _no_route(self, error: IsthmusError, now_s: float) -> None:
        self.error = error
        if not self._wait.refused(error, first=self.attempts == 0, now_s=now_s):
            self._fail(error, "replanned")

    # Replies

    def _on_answered(self, event: Answered, now_s: float) -> None:
        role = Role.PREFILL if event.call is Call.PREFILL else Role.DECODE
        party = self._parties.get((event.generation, role))
        if party is None:
            return
        silent = isinstance(event.error, (DeadlineExceeded, BusDisconnected))
        if party.ended is Ended.CANCELLED and event.call is not Call.START and (silent or event.error is None):
            # It may have taken the work up after our Cancel had passed.
            self._effects.append(SendCancel(party.worker, party.generation, party.reason))
            return
        if event.error is None:
            if self._current(party):
                self._on_accepted(event, now_s)
            return
        if party.ended is not None or (silent and party.heard):
            return  # its tokens are answer enough
        if not silent and event.call is not Call.START:
            party.ended = Ended.REFUSED
        if self._current(party):
            self._fail_attempt(event.error, party.worker.incarnation, now_s)

    def _on_accepted(self, event: Answered, now_s: float) -> None:
        attempt = self._attempt
        assert attempt is not None
        if event.call is Call.PREFILL:
            if event.ticket is None:
                self._fail_attempt(EngineFailed("the prefill worker accepted without a ticket"), None, now_s)
                return
            attempt.ticket = event.ticket
            if self.state is SagaState.PREFILLING:
                self.state = SagaState.CROSSING
        elif event.call is Call.DECODE:
            attempt.decode_accepted = True
        self._advance(attempt, now_s)

    def _advance(self, attempt: Attempt, now_s: float) -> None:
        """Ask decode for room as soon as there is a ticket, and start it as soon as there is a first token, too."""
        prefill, decode = attempt.parties.get(Role.PREFILL), attempt.parties.get(Role.DECODE)
        if prefill is None:
            return
        if decode is None:
            if attempt.ticket is not None and self.max_tokens - attempt.offset > 1:
                self._submit(Role.DECODE, attempt.route.decode, attempt.ticket, now_s)
        elif attempt.decode_accepted and not attempt.start_sent and attempt.first_token_at_s is not None:
            attempt.start_sent = True
            self._effects.append(Start(decode.worker, self.generation, self.output[attempt.offset]))

    # Tokens

    def _on_output(self, event: Output, now_s: float) -> None:
        seq, attempt = event.event, self._attempt
        if attempt is None or self.state in _OVER or seq.generation != self.generation:
            return
        party = next((p for p in attempt.parties.values() if p.worker.incarnation == event.incarnation), None)
        if party is None or party.ended is not None:
            return
        attempt.resync_by_s = None
        known = len(self.output) - seq.output_index  # tokens of this event that we have already, if ≥ 0
        counted = bool(seq.token_ids) or seq.finish in (None, FinishReason.STOP, FinishReason.LENGTH)
        if counted and known < 0:
            if seq.finish not in (None, FinishReason.HANDOFF):
                party.ended = Ended.TERMINAL
            why = f"output {seq.output_index} came where {len(self.output)} was due"
            self._fail_attempt(TransferFailed("tokens were lost on the bus", why=why), None, now_s)
            return
        if len(seq.token_ids) > known:
            self._take(seq, known, attempt, party, now_s)
        if seq.finish is not None:
            self._on_finish(seq, attempt, party, now_s)
        elif len(self.output) >= self.max_tokens:
            self._done(FinishReason.LENGTH)
        if not self.over and attempt is self._attempt:
            self._advance(attempt, now_s)
            self.flow = Flow(attempt, party, self.output, self.max_tokens) if attempt.flows_from(party) else None

    def _take(self, seq: SequenceEvent, known: int, attempt: Attempt, party: Party, now_s: float) -> None:
        room = self.max_tokens - len(self.output)
        new = seq.token_ids[known : known + room] if known or len(seq.token_ids) > room else seq.token_ids
        logprobs = seq.logprobs[known : known + room] if seq.logprobs is not None else None
        self._effects.append(Deliver(len(self.output), new, logprobs, seq.cached_tokens))
        self.output.extend(new)
        attempt.last_token_at_s = now_s
        party.heard = True
        if attempt.first_token_at_s is None:
            attempt.first_token_at_s = now_s
            self.state = SagaState.DECODING
        if party.role is Role.DECODE:
            prefill = attempt.parties.get(Role.PREFILL)
            if prefill is not None and prefill.ended is None:
                prefill.ended = Ended.CONSUMED

    def _on_finish(self, seq: SequenceEvent, attempt: Attempt, party: Party, now_s: float) -> None:
        match seq.finish:
            case FinishReason.STOP | FinishReason.LENGTH:
                party.ended = Ended.TERMINAL
                self._done(seq.finish)
            case FinishReason.HANDOFF if attempt.first_token_at_s is None:
                self._fail_attempt(TransferFailed("the first token was lost on the bus"), None, now_s)
            case FinishReason.HANDOFF:
                party.handed_off = True
            case _:
                was_handed_off, party.ended = party.handed_off, Ended.TERMINAL
                if was_handed_off:
                    return  # decode will say whether it got everything
                self._fail_attempt(party.why_ended(seq), party.worker.incarnation, now_s)

    # Faults, time and the end

    def _on_worker_gone(self, event: WorkerGone, now_s: float) -> None:
        if self.over:
            return
        if len(self._gone) < MAX_EXCLUDED:
            self._gone[event.incarnation] = event
        attempt = self._attempt
        if attempt is None:
            return
        lost = PartyLost("a worker was lost", why=event.why)
        for party in attempt.parties.values():
            if party.worker.incarnation == event.incarnation and party.ended is None:
                if event.certain:
                    party.ended = Ended.GONE
                if not party.handed_off:
                    self._fail_attempt(lost, event.incarnation, now_s)
                return
        if Role.DECODE not in attempt.parties and attempt.route.decode.incarnation == event.incarnation:
            self._fail_attempt(lost, event.incarnation, now_s)

    def _on_tick(self, now_s: float) -> None:
        if self.over or now_s < self._next_wake_s():
            return
        if now_s >= self.deadline_s:
            self._fail(DeadlineExceeded("the request's time is over", todo="ask for fewer tokens"), "deadline")
        elif self._wait.again_at_s is not None:
            self._ask_route()
        elif (attempt := self._attempt) is not None:
            error, exclude = attempt.overdue(now_s)
            self._fail_attempt(error, exclude, now_s)

    def _next_wake_s(self) -> float:
        if self.over:
            return float("inf")
        if self._wait.again_at_s is not None:
            return min(self._wait.again_at_s, self.deadline_s)
        if self._attempt is None:
            return self.deadline_s
        return min(self._attempt.due_s(), self.deadline_s)

    def _fail_attempt(self, error: IsthmusError, exclude: Incarnation | None, now_s: float) -> None:
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
        self._cancel_parties("replanned")
        if len(self.output) >= self.max_tokens:
            self._done(FinishReason.LENGTH)
            return
        self._want_route(now_s)
        self._effects.append(Replanned(self.generation, error))

    def _done(self, finish: FinishReason) -> None:
        self.state = SagaState.DONE
        self._cancel_parties("finished")
        self._effects.append(End(finish, None))

    def _fail(self, error: IsthmusError, reason: CancelReason) -> None:
        self.state, self.error = SagaState.FAILED, error
        self._cancel_parties(reason)
        self._effects.append(End(None, error))

    def _cancel_parties(self, reason: CancelReason) -> None:
        if self._attempt is not None:
            for party in self._attempt.parties.values():
                if party.ended is None:
                    party.ended, party.reason = Ended.CANCELLED, reason
                    self._effects.append(SendCancel(party.worker, party.generation, reason))
        self._attempt = self.flow = None
        self._wait.again_at_s = None

    def _current(self, party: Party) -> bool:
        return self._attempt is not None and not self.over and self._attempt.parties.get(party.role) is party

    def check_invariants(self) -> None:
        check_saga(self.state, self._attempt, self._parties.values())
        assert len(self.output) <= self.max_tokens
        assert self.attempts <= min(self.generation, self.max_attempts)
        assert self.flow is None or self.flow.attempt is self._attempt
