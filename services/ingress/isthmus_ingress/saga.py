"""One request's state machine (ADR 1, ADR 9): events in, effects out. No clock, socket, log or randomness.

    QUEUED ─route─▶ PREFILLING ─ticket─▶ CROSSING ─first token─▶ DECODING ─finish─▶ DONE
       ▲  ╲                                 ▲  ▲                    │  │
       │   ╲────────── KV is staged ────────╯  ╰──── moved ─────────╯  │
       ╰─────────── re-plan: generation + 1 ───────────────────────────╯      any ─▶ FAILED

Rules that hold whatever the order of events:

* each output token is delivered once and in order, over all attempts;
* each party that was asked for work gets exactly one end: its own terminal event, its refusal, its death, the
  decode side's first token (for staged KV; a Release follows once nobody may want it again), or a Cancel. A party that
  accepts after it was cancelled is cancelled again, since the Cancel may have overtaken the work;
* after `End` nothing is delivered, and no party is left without an end;
* every question for a route has a generation of its own, but only one that led to a submit counts as an attempt;
* of staged KV each attempt to fetch it has a `pull` of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_ingress.saga_base import MAX_EXCLUDED, SagaBase
from isthmus_ingress.saga_parties import MIN_DEADLINE_S, RESYNC_S, Attempt, Ended, Flow, Party
from isthmus_ingress.saga_staged import MOVE_S, Move, Staged, blames_kv
from isthmus_ingress.saga_types import (
    Answered,
    AskRoute,
    Begin,
    BusBack,
    Call,
    ClientGone,
    Deliver,
    Effect,
    Event,
    MoveWanted,
    Noted,
    Output,
    Routed,
    RouteFailed,
    SagaState,
    Save,
    SendCancel,
    Start,
    StepBroke,
    StopFound,
    Tick,
    WorkerBack,
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
    TransferFailed,
)
from isthmus_shared.ids import Generation
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.route import Mode, Route
from isthmus_shared.messages.work import FinishReason, SequenceEvent


@dataclass(slots=True)
class Saga(SagaBase):
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
            case WorkerBack():
                self._on_worker_back(event)
            case MoveWanted():
                self._on_move_wanted(event, now_s)
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

    # Routes

    def _on_routed(self, event: Routed, now_s: float) -> None:
        if self._move is not None and self._move.generation == event.generation:
            self._on_move_routed(self._move, event.route, now_s)
            return
        if not self._asking(event.generation):
            return
        route, staged = event.route, self._staged
        resumes = route.mode is Mode.DISAGGREGATED and route.prefill is None
        if resumes and staged is None:
            self._fail(ProtocolViolation("a disaggregated route names no prefill worker"), "replanned")
            return
        for worker in (route.prefill, route.decode):
            if worker is not None and worker.incarnation in self._gone:
                self._on_lost_route(worker, now_s)
                return
        self.attempts += 1
        if resumes and staged is not None:
            self._effects.append(Noted("resumed"))
            self._resume(route, staged, now_s)
        else:
            self._begin(route, now_s)

    def _on_route_failed(self, event: RouteFailed, now_s: float) -> None:
        if self._move is not None and self._move.generation == event.generation:
            self._stay()
        elif self._asking(event.generation):
            if isinstance(event.error, ProtocolViolation) and self._staged is not None:
                self._drop_staged()  # a planner that knows nothing of staged KV
                self._ask_route()
            else:
                self._no_route(event.error, now_s)

    # Replies

    def _on_answered(self, event: Answered, now_s: float) -> None:
        if event.call is Call.SAVE:
            self._on_saved(event, now_s)
            return
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
            self._lose(party, event.error, now_s, doubtful=blames_kv(event.error))

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
        if attempt.lost is not None:
            if attempt.ticket is not None and not attempt.prefilling:
                self._fail_attempt(*attempt.lost, now_s)  # somebody else will decode what it has staged
        elif decode is None:
            if attempt.ticket is not None and self.max_tokens - attempt.offset > 1:
                self._submit(Role.DECODE, attempt.route.decode, attempt.ticket, now_s)
        elif attempt.decode_accepted and not attempt.start_sent and attempt.first_token_at_s is not None:
            attempt.start_sent = True
            self._effects.append(Start(decode.worker, self.generation, self.output[attempt.offset]))

    # Tokens

    def _on_output(self, event: Output, now_s: float) -> None:
        seq, attempt = event.event, self._attempt
        party = None if attempt is None else attempt.party(event.incarnation, seq.generation)
        if attempt is None or party is None or party.ended is not None:
            return
        attempt.resync_by_s = None
        known = len(self.output) - seq.output_index  # tokens of this event that we have already, if ≥ 0
        counted = bool(seq.token_ids) or seq.finish in (None, FinishReason.STOP, FinishReason.LENGTH)
        given_away = seq.finish is FinishReason.HANDOFF and party.role is Role.DECODE
        if (counted or given_away) and known < 0:
            if seq.finish not in (None, FinishReason.HANDOFF):
                party.ended = Ended.TERMINAL
            why = f"output {seq.output_index} came where {len(self.output)} was due"
            self._fail_attempt(TransferFailed("tokens were lost on the bus", why=why), None, now_s)
            return
        if seq.token_ids and len(seq.token_ids) > known:
            self._take(seq, known, attempt, party, now_s)
        if seq.finish is not None:
            self._on_finish(seq, attempt, party, now_s)
        elif len(self.output) >= self.max_tokens:
            self._done(FinishReason.LENGTH)
        if not self.over and attempt is self._attempt:
            self._advance(attempt, now_s)
        if not self.over and attempt is self._attempt:
            usual = self._move is None and attempt.flows_from(party)
            self.flow = Flow(attempt, party, self.output, self.max_tokens) if usual else None

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
        if party is attempt.parties.get(Role.DECODE):
            prefill = attempt.parties.get(Role.PREFILL)
            if prefill is not None and prefill.ended is None:
                prefill.ended = Ended.CONSUMED

    def _on_finish(self, seq: SequenceEvent, attempt: Attempt, party: Party, now_s: float) -> None:
        match seq.finish:
            case FinishReason.STOP | FinishReason.LENGTH:
                party.ended = Ended.TERMINAL
                self._done(seq.finish)
            case FinishReason.HANDOFF if party is attempt.parties.get(Role.DECODE):
                party.handed_off = True
                self._on_given_away(attempt, party, now_s)
            case FinishReason.HANDOFF if attempt.first_token_at_s is None and not attempt.resumed:
                self._fail_attempt(TransferFailed("the first token was lost on the bus"), None, now_s)
            case FinishReason.HANDOFF:
                party.handed_off = True
            case _:
                was_handed_off, party.ended = party.handed_off, Ended.TERMINAL
                if was_handed_off:
                    return  # decode will say whether it got everything
                self._lose(party, party.why_ended(seq), now_s, doubtful=not attempt.decode_heard)

    # Moves

    def _on_move_wanted(self, event: MoveWanted, now_s: float) -> None:
        attempt = self._attempt
        source = None if attempt is None else attempt.parties.get(Role.DECODE)
        if self._move is not None or source is None or source.ended is not None or not source.heard:
            return
        if source.worker.incarnation != event.incarnation or self.max_tokens - len(self.output) <= 1:
            return
        self.generation = Generation(self.generation + 1)
        self._move, self.flow = Move(source, self.generation, now_s + MOVE_S), None
        exclude = (*self.excluded, event.incarnation)[-MAX_EXCLUDED:]
        self._effects.append(AskRoute(self.generation, exclude, moving=event))

    def _on_move_routed(self, move: Move, route: Route, now_s: float) -> None:
        there = route.decode.incarnation
        if route.mode is not Mode.DISAGGREGATED or route.prefill is not None:
            self._stay()  # nobody could go on from its KV
        elif there in self._gone or there == move.source.worker.incarnation:
            self._stay()
        elif move.route is None:
            move.route = route
            left_s = max(self.deadline_s - now_s, MIN_DEADLINE_S)
            deadline_s = min(max(route.deadlines.ttft_s, route.deadlines.transfer_s), left_s)
            source = move.source
            self._effects.append(Save(source.worker, source.generation, move.generation, deadline_s, left_s))

    def _on_saved(self, event: Answered, now_s: float) -> None:
        move, attempt = self._move, self._attempt
        if move is None or attempt is None or move.generation != event.generation:
            return
        if event.ticket is not None:
            move.ticket = event.ticket
        else:
            self._stay()
        if move.source.handed_off:
            self._on_given_away(attempt, move.source, now_s)

    def _on_given_away(self, attempt: Attempt, source: Party, now_s: float) -> None:
        """Its KV is staged; with the ticket it goes on elsewhere. The attempt is the same: nobody has failed."""
        move = self._move
        if move is None or move.source is not source:
            error = PartyLost(f"worker {source.worker.worker_id} gave the sequence away, and nobody knows where to")
            self._fail_attempt(error, source.worker.incarnation, now_s)
        elif move.ticket is not None and move.route is not None:
            self._move = None
            self._effects.append(Noted("moved"))
            earlier = attempt.parties.get(Role.PREFILL)
            if earlier is not None:
                self._end_party(earlier, "finished")
            self._resume(move.route, Staged(move.ticket, source), now_s)

    # Faults and time

    def _lose(self, party: Party, error: IsthmusError, now_s: float, *, doubtful: bool = False) -> None:
        """A party of the attempt is lost to it. Without decode, a prefill goes on: another one can decode its KV."""
        attempt = self._attempt
        assert attempt is not None
        if party.role is Role.DECODE and attempt.prefilling:
            self._end_party(party, "replanned")
            attempt.lost = attempt.lost or (error, party.worker.incarnation)
        else:
            self._fail_attempt(error, party.worker.incarnation, now_s, doubtful=doubtful)

    def _on_worker_gone(self, event: WorkerGone, now_s: float) -> None:
        if self.over:
            return
        if len(self._gone) < MAX_EXCLUDED:
            self._gone[event.incarnation] = event
        attempt, life = self._attempt, event.incarnation
        lost = PartyLost("a worker was lost", why=event.why)
        if attempt is None:
            kept = None if self._staged is None else self._staged.producer
            if kept is not None and kept.ended is None and event.certain and kept.worker.incarnation == life:
                kept.ended = Ended.GONE  # its relay has the KV
            return
        hit = [p for p in attempt.parties.values() if p.worker.incarnation == life and p.ended is None]
        for party in hit if event.certain else ():
            party.ended = Ended.GONE
        decode = attempt.parties.get(Role.DECODE)
        for party in hit:
            if party is decode or not party.handed_off:  # else its relay has the KV
                self._lose(party, lost, now_s)
                return
        if decode is None and not hit and attempt.route.decode.incarnation == life:
            if attempt.prefilling:
                attempt.lost = attempt.lost or (lost, life)
            else:
                self._fail_attempt(lost, life, now_s)

    def _on_worker_back(self, event: WorkerBack) -> None:
        """It had only been silent: whoever asks for a route again may get it."""
        gone = self._gone.get(event.incarnation)
        if gone is not None and not gone.certain:
            del self._gone[event.incarnation]
            if event.incarnation in self.excluded:
                self.excluded.remove(event.incarnation)

    def _on_tick(self, now_s: float) -> None:
        if self.over or now_s < self._next_wake_s():
            return
        if now_s >= self.deadline_s:
            self._fail(DeadlineExceeded("the request's time is over", todo="ask for fewer tokens"), "deadline")
        elif self._wait.again_at_s is not None:
            self._ask_route()
        elif (attempt := self._attempt) is not None:
            if now_s >= attempt.due_s():
                error, exclude = attempt.overdue(now_s)
                bus = attempt.resync_by_s is not None and now_s >= attempt.resync_by_s
                self._fail_attempt(error, exclude, now_s, doubtful=not bus and not attempt.decode_heard)
            else:
                self._stay()

    def _next_wake_s(self) -> float:
        if self.over:
            return float("inf")
        if self._wait.again_at_s is not None:
            return min(self._wait.again_at_s, self.deadline_s)
        if self._attempt is None:
            return self.deadline_s
        move_s = float("inf") if self._move is None else self._move.until_s
        return min(self._attempt.due_s(), self.deadline_s, move_s)
