"""The saga against a world in which anything may happen in any order.

The world's workers hold a request from the moment that they take a submit up until they end it, refuse it, die, are
cancelled, or (prefill, after its hand-over) decode has shown that it has the KV. Whatever the order: tokens reach the
client once and in order, the saga ends, and then nobody holds anything. Only submits use up attempts, and nobody
waits for a route beyond the saga's patience.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from isthmus_ingress.saga import Saga
from isthmus_ingress.saga_types import (
    Answered,
    AskRoute,
    Begin,
    BusBack,
    Call,
    ClientGone,
    Deliver,
    Effect,
    End,
    Event,
    MoveWanted,
    Output,
    Routed,
    RouteFailed,
    Save,
    SendCancel,
    SendRelease,
    Start,
    StopFound,
    Submit,
    Tick,
    WorkerGone,
)
from isthmus_shared.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    IsthmusError,
    NoCapacity,
    NoResponders,
    Retry,
    StaleParty,
    Unavailable,
)
from isthmus_shared.ids import Generation, Incarnation, RequestId
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.work import FinishReason, SequenceEvent
from isthmus_testing.saga_world import LIMITS, TICKET, make_route, staged_route, token_at

DEADLINE_S = 60.0
ATTEMPTS = 3
PATIENCE_S = 5.0
FIRST_TRIES = 2
STRAY = Answered(Call.PREFILL, Generation(99))
"""Changes nothing."""


@dataclass
class Party:
    submit: Submit
    index: int
    arrived: bool = False
    answered: bool = False
    holding: bool = False
    started: bool = False
    over: bool = False
    cancels: int = 0
    cancelled_unanswered: bool = False
    resumed: bool = False
    sealed: bool = False
    """Its KV is staged."""
    fetched: bool = False
    """And what is retained of it waits for its release; or for a Cancel, if the saga has not heard who fetched it."""
    released: bool = False

    @property
    def aggregated(self) -> bool:
        return self.submit.role is Role.DECODE and self.submit.ticket is None

    @property
    def may_speak(self) -> bool:
        if not self.holding or self.over or self.sealed:
            return False
        return self.submit.role is Role.PREFILL or self.aggregated or self.resumed or self.started


class AnyOrder(RuleBasedStateMachine):
    @initialize(max_tokens=st.integers(1, 8), lives=st.just(0))
    def begin(self, max_tokens: int, lives: int) -> None:
        self.now_s = 0.0
        self.max_tokens = max_tokens
        self.saga = Saga(
            max_tokens=max_tokens, deadline_s=DEADLINE_S, max_attempts=ATTEMPTS, route_patience_s=PATIENCE_S
        )
        self.routes: list[AskRoute] = []
        self.asked = Generation(0)  # for a route, last
        self.wanted_since_s = 0.0
        self.refusals = 0  # since then
        self.parties: dict[tuple[int, Role], Party] = {}
        self.starts: list[Start] = []
        self.moves: list[AskRoute] = []
        self.moved: set[Generation] = set()  # generations of moves
        self.saves: list[Save] = []
        self.done_saves: list[Save] = []
        self.pulls: set[tuple[Generation, int]] = set()
        self.delivered: list[int] = []
        self.ends: list[End] = []
        self.lives = lives  # workers' lives so far
        self.feed(Begin())

    def feed(self, event: Event) -> None:
        before = copy.deepcopy(self.saga) if isinstance(event, Output) else None
        effects = self.saga.handle(event, now_s=self.now_s)
        if isinstance(event, Output) and before is not None:
            self.compare_flow(before, event, effects)
        for effect in effects:
            self.execute(effect)

    def compare_flow(self, short: Saga, event: Output, effects: list[Effect]) -> None:
        """What the short way takes, the long one handles to the same state, and only delivers the tokens."""
        if short.flow is None or not short.flow.take(event.incarnation, event.event, self.now_s):
            return
        assert [type(effect) for effect in effects] == [Deliver]
        assert effects[0].token_ids == event.event.token_ids  # type: ignore[union-attr]
        long = copy.deepcopy(self.saga)
        for saga in (short, long):
            saga.handle(STRAY, now_s=self.now_s)  # so that both have noted when they are due
        assert repr(short) == repr(long)

    def execute(self, effect: Effect) -> None:
        assert not self.ends or isinstance(effect, SendCancel), f"{effect} after the end"
        match effect:
            case AskRoute(moving=MoveWanted()):
                assert effect.generation > self.asked
                self.moves = [effect]
                self.moved.add(effect.generation)
            case AskRoute():
                assert effect.generation > self.asked
                if any(generation == self.asked for generation, _ in self.parties):  # an attempt has failed
                    self.wanted_since_s, self.refusals = self.now_s, 0
                self.asked = effect.generation
                self.routes = [effect]  # whoever was asked before is no longer listened to
            case Submit():
                key = (effect.generation, effect.role)
                assert key not in self.parties, "one submit for each role and attempt"
                assert effect.generation in (self.asked, *self.moved)
                self.asked = max(self.asked, effect.generation)
                counted = ({generation for generation, _ in self.parties} | {effect.generation}) - self.moved
                assert len(counted) <= ATTEMPTS
                assert list(effect.output) == [token_at(i) for i in range(len(effect.output))]
                self.submit(effect)
            case Start():
                self.starts.append(effect)
            case Save():
                assert effect.transfer_generation in self.moved
                self.saves.append(effect)
            case SendCancel():
                self.cancel(effect)
            case SendRelease():
                party = self.party_of(effect)
                assert party.fetched or party.over, "what nobody has fetched is cancelled"
                assert not party.cancels
                assert not party.released, "once"
                party.released = True
            case Deliver():
                assert effect.output_index == len(self.delivered)
                self.delivered.extend(effect.token_ids)
            case End():
                self.ends.append(effect)

    def submit(self, effect: Submit) -> None:
        ticket = effect.ticket
        resumed = ticket is not None and (effect.generation, Role.PREFILL) not in self.parties
        index = len(effect.output) + (ticket is not None and not resumed)
        if ticket is not None:
            assert ticket.generation <= effect.generation
            assert (ticket.generation, ticket.pull) not in self.pulls, "two may fetch it under one number"
            assert all(pull < ticket.pull for generation, pull in self.pulls if generation == ticket.generation)
            self.pulls.add((ticket.generation, ticket.pull))
            assert not self.producer(ticket.generation).released
        self.parties[effect.generation, effect.role] = Party(effect, index, resumed=resumed)

    def producer(self, generation: Generation) -> Party:
        """Whoever staged the KV that has that name."""
        if generation in self.moved:
            (save,) = (save for save in self.done_saves if save.transfer_generation == generation)
            return self.party_of(save)
        return self.parties[generation, Role.PREFILL]

    def party_of(self, effect: SendCancel | SendRelease | Save) -> Party:
        return next(
            p
            for p in self.parties.values()
            if p.submit.worker == effect.worker and p.submit.generation == effect.generation
        )

    def cancel(self, effect: SendCancel) -> None:
        party = self.party_of(effect)
        # A second one may cross its own end: the saga no longer listened, and it might have held something.
        assert not party.over or party.cancels == 1, "a party that has ended by itself needs no Cancel"
        party.cancels += 1
        assert party.cancels == 1 or (party.cancels == 2 and party.cancelled_unanswered and party.answered)
        party.cancelled_unanswered = party.cancelled_unanswered or not party.answered
        party.holding = False

    def pick(self, place: int, among: list[Party]) -> Party | None:
        return among[place % len(among)] if among else None

    def output(self, party: Party, index: int, tokens: tuple[int, ...], finish: FinishReason | None) -> None:
        fault = EngineFailed("raised").to_fault() if finish is FinishReason.ERROR else None
        event = SequenceEvent(
            request_id=RequestId("r"),
            generation=party.submit.generation,
            output_index=index,
            token_ids=tokens,
            finish=finish,
            fault=fault,
        )
        if party.submit.role is Role.DECODE and tokens and party.submit.ticket is not None:
            producer = self.producer(party.submit.ticket.generation)
            if producer.holding:  # it has the KV, and says so to the producer's relay
                producer.holding, producer.fetched = False, True
        self.feed(Output(party.submit.worker.incarnation, event))

    # What goes well, several steps at a time: else chance alone would rarely come as far as decode

    @rule(places=st.lists(st.integers(0, 11), min_size=1, max_size=8), aggregated=st.booleans(), anew=st.booleans())
    def progress(self, places: list[int], aggregated: bool, anew: bool) -> None:
        for place in places:
            self.route(aggregated, anew)
            if place < 2:
                self.hand_off(place)
            elif place < 8:
                self.speak(place, 1 + place % 3)
            else:
                self.take_up(place)
                self.accept(place)
                self.start(heard=True, error=None)

    @rule(place=st.integers(0, 5), how=st.integers(1, 4), anew=st.booleans())
    def change_decode(self, place: int, how: int, anew: bool) -> None:
        """From a whole disaggregated request on to another decode worker: one that died (1), or gives it away."""
        self.progress([8, 8, 0, 0, 0, 9, 9, 9, 2], aggregated=False, anew=True)
        if how == 1:
            speaking = [p for p in self.parties.values() if p.may_speak and p.submit.role is Role.DECODE]
            party = self.pick(place, speaking)
            if party is not None:
                self.kill(party, certain=anew)
            self.route(aggregated=False, anew=True)
        else:
            self.want_a_move(place)
            if self.moves:
                self.route_a_move(how)
            if self.saves:
                self.save(how)
        self.progress([8, 8, 2, 3], aggregated=False, anew=anew)

    def route(self, aggregated: bool, anew: bool) -> None:
        if self.routes:
            ask = self.routes.pop()
            self.lives += int(anew or self.lives == 0)
            route = make_route(self.lives, aggregated=aggregated)
            if ask.staged is not None and (anew or aggregated):
                producer = self.producer(ask.staged.generation)
                assert producer.sealed or producer.fetched
                route = staged_route(self.lives)
            self.feed(Routed(ask.generation, route))

    # What the planner does

    @precondition(lambda self: self.routes)
    @rule(error=st.sampled_from([NoResponders("x"), Unavailable("x"), DeadlineExceeded("x"), InvalidRequest("x")]))
    def no_route(self, error: IsthmusError) -> None:
        if error.retry is not Retry.NEVER or len(self.delivered) % 2:
            self.refuse_route(error)

    def refuse_route(self, error: IsthmusError) -> None:
        was_over, self.refusals = self.saga.over, self.refusals + 1
        self.feed(RouteFailed(self.routes.pop().generation, error))
        if self.parties:
            patient = self.now_s < self.wanted_since_s + PATIENCE_S
        else:
            patient = self.refusals < FIRST_TRIES
        assert self.saga.over == (was_over or error.retry is Retry.NEVER or not patient)

    @rule(generation=st.integers(1, 6))
    def stray_route(self, generation: int) -> None:
        if not any(ask.generation == generation for ask in (*self.routes, *self.moves)):
            self.feed(Routed(Generation(generation), make_route(99, aggregated=True)))

    # Moves

    @rule(place=st.integers(0, 5))
    def want_a_move(self, place: int) -> None:
        party = self.pick(place, [p for p in self.parties.values() if p.may_speak and p.submit.role is Role.DECODE])
        if party is not None:
            self.feed(MoveWanted(party.submit.worker.incarnation, TICKET.source, "m", "form"))

    @precondition(lambda self: self.moves)
    @rule(how=st.integers(0, 4))
    def route_a_move(self, how: int) -> None:
        ask = self.moves.pop()
        self.lives += 1
        if how == 0:
            self.feed(RouteFailed(ask.generation, Unavailable("nobody else")))
        else:
            self.feed(Routed(ask.generation, make_route(self.lives) if how == 1 else staged_route(self.lives)))

    @precondition(lambda self: self.saves)
    @rule(how=st.integers(0, 4))
    def save(self, how: int) -> None:
        save = self.saves.pop()
        party = self.party_of(save)
        generation = save.transfer_generation
        if not party.may_speak or how == 0:
            self.feed(Answered(Call.SAVE, generation, error=StaleParty("not here")))
            return
        self.done_saves.append(save)
        party.sealed = how != 3  # 3: the copy fails after the answer, and it goes on
        ticket = TICKET.model_copy(update={"generation": generation})
        answer = Answered(Call.SAVE, generation, error=DeadlineExceeded("x")) if how == 4 else None
        if how != 1:
            self.feed(answer or Answered(Call.SAVE, generation, ticket))
        if party.sealed and party.holding and not party.over:
            self.output(party, party.index, (), FinishReason.HANDOFF)
        if how == 1:
            self.feed(Answered(Call.SAVE, generation, ticket))

    # What workers do

    @rule(place=st.integers(0, 5))
    def take_up(self, place: int) -> None:
        party = self.pick(place, [p for p in self.parties.values() if not p.arrived])
        if party is not None:
            party.arrived = party.holding = True

    @rule(place=st.integers(0, 5))
    def accept(self, place: int) -> None:
        party = self.pick(place, [p for p in self.parties.values() if p.arrived and not p.answered])
        if party is not None:
            self.answer(party, None)

    @rule(
        place=st.integers(0, 5), error=st.sampled_from([NoCapacity("full"), StaleParty("old"), NoResponders("nobody")])
    )
    def refuse(self, place: int, error: IsthmusError) -> None:
        party = self.pick(place, [p for p in self.parties.values() if not p.arrived])
        if party is not None:
            party.arrived = party.over = True
            self.answer(party, error)

    @rule(place=st.integers(0, 5))
    def lose_the_answer(self, place: int) -> None:
        party = self.pick(place, [p for p in self.parties.values() if p.arrived and not p.answered])
        if party is not None:
            self.answer(party, DeadlineExceeded("no answer"))

    def answer(self, party: Party, error: IsthmusError | None) -> None:
        party.answered = True
        prefill = party.submit.role is Role.PREFILL
        ticket = TICKET.model_copy(update={"generation": party.submit.generation}) if prefill and not error else None
        call = Call.PREFILL if prefill else Call.DECODE
        self.feed(Answered(call, party.submit.generation, ticket, error))

    @rule(heard=st.booleans(), error=st.sampled_from([None, DeadlineExceeded("x"), StaleParty("x")]))
    def start(self, heard: bool, error: IsthmusError | None) -> None:
        if not self.starts:
            return
        start = self.starts.pop()
        party = self.parties[start.generation, Role.DECODE]
        assert start.first_token_id == token_at(len(party.submit.output))
        party.started = heard and error is None
        self.feed(Answered(Call.START, start.generation, error=error))

    @rule(place=st.integers(0, 5), count=st.integers(1, 3))
    def speak(self, place: int, count: int) -> None:
        party = self.pick(place, [p for p in self.parties.values() if p.may_speak and p.index < self.max_tokens])
        if party is None:
            return
        first_only = party.submit.role is Role.PREFILL
        if first_only and party.index > len(party.submit.output):
            return
        tokens = tuple(
            token_at(i) for i in range(party.index, min(self.max_tokens, party.index + (1 if first_only else count)))
        )
        index, party.index = party.index, party.index + len(tokens)
        finish = FinishReason.LENGTH if party.index == self.max_tokens else None
        if finish is not None:
            party.holding, party.over = False, True
        self.output(party, index, tokens, finish)

    @rule(place=st.integers(0, 5))
    def repeat(self, place: int) -> None:
        party = self.pick(place, [p for p in self.parties.values() if p.may_speak and p.index > len(p.submit.output)])
        if party is not None:
            self.output(party, party.index - 1, (token_at(party.index - 1),), None)

    @rule(place=st.integers(0, 5))
    def lose_a_token(self, place: int) -> None:
        party = self.pick(place, [p for p in self.parties.values() if p.may_speak and p.index < self.max_tokens])
        if party is not None:
            party.index += 1

    @rule(place=st.integers(0, 5))
    def hand_off(self, place: int) -> None:
        spoken = [
            p
            for p in self.parties.values()
            if p.may_speak and p.submit.role is Role.PREFILL and p.index > len(p.submit.output)
        ]
        party = self.pick(place, spoken)
        if party is not None:
            party.sealed = True
            self.output(party, party.index, (), FinishReason.HANDOFF)

    @rule(place=st.integers(0, 5), finish=st.sampled_from([FinishReason.ERROR, FinishReason.CANCELLED]))
    def fail(self, place: int, finish: FinishReason) -> None:
        # One that is sealed says no more: its KV is its relay's.
        party = self.pick(place, [p for p in self.parties.values() if p.holding and not p.over and not p.sealed])
        if party is not None:
            party.holding, party.over = False, True
            self.output(party, party.index, (), finish)

    @rule(place=st.integers(0, 5), certain=st.booleans())
    def die(self, place: int, certain: bool) -> None:
        party = self.pick(place, [p for p in self.parties.values() if not p.over])
        if party is not None:
            self.kill(party, certain)

    def kill(self, party: Party, certain: bool) -> None:
        life = party.submit.worker.incarnation
        for one in [p for p in self.parties.values() if certain and p.submit.worker.incarnation == life]:
            one.holding = False
            one.arrived = one.answered = one.over = True
        self.feed(WorkerGone(party.submit.worker.incarnation, "gone", certain))

    @rule(place=st.integers(0, 5), late=st.booleans())
    def stray_output(self, place: int, late: bool) -> None:
        """From a stranger, or of an earlier attempt at the same worker."""
        party = self.pick(place, [p for p in self.parties.values() if p.cancels or p.over])
        generation, life = Generation(self.saga.generation), Incarnation("stranger")
        if late and party is not None:
            generation, life = party.submit.generation, party.submit.worker.incarnation
        event = SequenceEvent(
            request_id=RequestId("r"), generation=generation, output_index=len(self.delivered), token_ids=(999,)
        )
        self.feed(Output(life, event))

    # What time and the client do

    @rule(step_s=st.sampled_from([0.1, 0.1, 1.0, 4.0]))
    def tick(self, step_s: float) -> None:
        self.now_s += step_s
        self.feed(Tick())

    @rule()
    def the_bus_comes_back(self) -> None:
        self.feed(BusBack())

    @rule(luck=st.integers(0, 7))
    def the_end_from_here(self, luck: int) -> None:
        if luck == 7:
            self.feed(ClientGone())
        elif luck == 6 and self.delivered:
            self.feed(StopFound())

    # What always holds

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "saga"):
            self.saga.check_invariants()
            assert self.delivered == [token_at(i) for i in range(len(self.delivered))]
            assert len(self.ends) == int(self.saga.over)
            assert self.saga.over or self.saga.wake_at_s <= DEADLINE_S, "there is always a time at which it wakes"

    def teardown(self) -> None:
        if not hasattr(self, "saga"):
            return
        while not self.saga.over:
            assert self.saga.wake_at_s <= DEADLINE_S
            if self.routes:
                self.refuse_route(Unavailable("the planner has none any more"))
            else:
                self.now_s = max(self.now_s, self.saga.wake_at_s)
                self.feed(Tick())
        for party in list(self.parties.values()):  # what was under way arrives after the end
            if not party.arrived:
                party.arrived = party.holding = True
            if not party.answered:
                self.answer(party, None)
        self.consistent()
        assert len(self.ends) == 1
        assert (self.ends[0].finish is None) != (self.ends[0].error is None)
        assert not [party for party in self.parties.values() if party.holding], "somebody was forgotten"
        kept = [p for p in self.parties.values() if p.fetched and not (p.released or p.cancels or p.over)]
        assert not kept, "KV is retained for nobody"
        assert LIMITS.ttft_s < DEADLINE_S


AnyOrder.TestCase.settings = settings(
    max_examples=400, stateful_step_count=25, deadline=None, derandomize=True, print_blob=False
)
TestAnyOrder = AnyOrder.TestCase
