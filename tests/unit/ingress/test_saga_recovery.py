"""The saga goes on from KV that is staged: after a decode worker's loss, and when it is asked to move."""

from __future__ import annotations

import pytest

from isthmus_ingress.saga import Saga
from isthmus_ingress.saga_staged import MOVE_S
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
    Noted,
    Output,
    Replanned,
    Routed,
    RouteFailed,
    SagaState,
    Save,
    SendCancel,
    SendRelease,
    Start,
    Submit,
    Tick,
    WorkerBack,
    WorkerGone,
)
from isthmus_shared.errors import (
    DeadlineExceeded,
    Draining,
    IsthmusError,
    ManifestMismatch,
    NoCapacity,
    ProtocolViolation,
    StaleParty,
    TransferFailed,
    Unavailable,
)
from isthmus_shared.ids import Generation, Incarnation, RequestId
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.work import FinishReason, SequenceEvent
from isthmus_testing.saga_world import LIMITS, TICKET, make_route, staged_route, token_at, worker

P1, D1, D2, D3 = (Incarnation(f"life-{name}") for name in ("p1", "d1", "d2", "d3"))
G1, G2, G3, G4 = (Generation(number) for number in (1, 2, 3, 4))
PULL_2, PULL_3 = (TICKET.model_copy(update={"pull": pull}) for pull in (2, 3))
MOVE = MoveWanted(D1, TICKET.source, "m", "form")
MOVED = TICKET.model_copy(update={"generation": G2})
DEADLINE_S = 100.0


class Play:
    """Three of ten tokens have been delivered; d1 decodes."""

    def __init__(self, *, aggregated: bool = False, max_tokens: int = 10) -> None:
        self.saga = Saga(max_tokens=max_tokens, deadline_s=DEADLINE_S, max_attempts=3, route_patience_s=4.0)
        self.tokens: list[int] = []
        self.effects: list[Effect] = []
        self.feed(Begin())
        self.feed(Routed(G1, make_route(1, aggregated=aggregated)))
        if aggregated:
            self.feed(Answered(Call.DECODE, G1))
            self.token(D1, 0)
        else:
            self.feed(Answered(Call.PREFILL, G1, TICKET))
            self.feed(Answered(Call.DECODE, G1))
            self.token(P1, 0, finish=FinishReason.HANDOFF)
        self.token(D1, 1, count=2)

    def feed(self, event: Event, *, at_s: float = 0.0) -> list[Effect]:
        self.effects = self.saga.handle(event, now_s=at_s)
        self.saga.check_invariants()
        self.tokens += [token for effect in self.effects if isinstance(effect, Deliver) for token in effect.token_ids]
        return self.effects

    def token(
        self, life: Incarnation, index: int, *, count: int = 1, finish: FinishReason | None = None, generation: int = 1
    ) -> list[Effect]:
        tokens = tuple(token_at(i) for i in range(index, index + count))
        fault = TransferFailed("x").to_fault() if finish is FinishReason.ERROR else None
        event = SequenceEvent(
            request_id=RequestId("r"),
            generation=Generation(generation),
            output_index=index,
            token_ids=tokens,
            finish=finish,
            fault=fault,
        )
        return self.feed(Output(life, event))

    def moving(self) -> Play:
        """A route for the move was found, and d1 was asked to stage the sequence."""
        self.feed(MOVE)
        self.feed(Routed(G2, staged_route(2)))
        return self

    def moved(self) -> Play:
        self.moving()
        self.token(D1, 3, count=0, finish=FinishReason.HANDOFF)
        self.feed(Answered(Call.SAVE, G2, MOVED))
        return self


def rest_of(play: Play, life: Incarnation, generation: int) -> None:
    """The stream's right end."""
    start = len(play.tokens)
    play.token(life, start, count=10 - start, generation=generation, finish=FinishReason.LENGTH)
    assert play.tokens == [token_at(i) for i in range(10)], "each token once and in order"
    assert play.effects[-1] == End(FinishReason.LENGTH, None)


# -- a decode worker is lost


def test_after_a_decode_workers_death_another_fetches_the_staged_kv_and_nobody_prefills() -> None:
    play = Play()
    play.feed(WorkerGone(D1, "killed"))
    assert play.effects[0] == AskRoute(G2, (D1,), PULL_2)
    play.feed(Routed(G2, staged_route(2)))
    output = tuple(token_at(i) for i in range(3))
    assert play.effects == [
        Noted("resumed"),
        Submit(Role.DECODE, worker("d2"), G2, output, PULL_2, LIMITS.transfer_s),
    ]
    assert play.saga.state is SagaState.CROSSING
    play.feed(Answered(Call.DECODE, G2))
    assert play.effects == [], "the last token is known: no start"
    rest_of(play, D2, 2)
    assert SendRelease(worker("p1"), G1) in play.effects, "nobody may want it again"


def test_each_attempt_to_fetch_the_kv_has_the_next_pull() -> None:
    play = Play()
    play.feed(WorkerGone(D1, "killed"))
    play.feed(Routed(G2, staged_route(2)))
    play.token(D2, 3, generation=2)
    play.feed(WorkerGone(D2, "killed"))
    assert play.effects[0] == AskRoute(G3, (D1, D2), PULL_3)
    play.feed(Routed(G3, staged_route(3)))
    rest_of(play, D3, 3)


def test_kv_that_was_never_fetched_is_cancelled_when_the_client_leaves() -> None:
    play = Play()
    play.feed(WorkerGone(D1, "killed"))
    play.feed(ClientGone())
    assert play.effects[0] == SendRelease(worker("p1"), G1)
    before = Saga(max_tokens=10, deadline_s=DEADLINE_S, max_attempts=3, route_patience_s=4.0)
    play = Play.__new__(Play)
    play.saga, play.tokens = before, []
    play.feed(Begin())
    play.feed(Routed(G1, make_route(1)))
    play.feed(Answered(Call.PREFILL, G1, TICKET))
    play.token(P1, 0, finish=FinishReason.HANDOFF)
    play.feed(Answered(Call.DECODE, G1, error=NoCapacity("full")))
    play.feed(ClientGone())
    assert play.effects[0] == SendCancel(worker("p1"), G1, "client_gone")


@pytest.mark.parametrize("error", [StaleParty("superseded"), ManifestMismatch("dtype"), TransferFailed("no relay")])
def test_a_refusal_that_may_be_the_tickets_fault_ends_in_a_second_prefill(error: IsthmusError) -> None:
    play = Play()
    play.feed(WorkerGone(D1, "killed"))
    play.feed(Routed(G2, staged_route(2)))
    play.feed(Answered(Call.DECODE, G2, error=error))
    assert AskRoute(G3, (D1, D2)) in play.effects
    assert SendRelease(worker("p1"), G1) in play.effects


@pytest.mark.parametrize("error", [NoCapacity("full"), Draining("going"), DeadlineExceeded("no answer")])
def test_a_refusal_that_is_the_workers_own_leaves_the_kv_to_the_next(error: IsthmusError) -> None:
    play = Play()
    play.feed(WorkerGone(D1, "killed"))
    play.feed(Routed(G2, staged_route(2)))
    play.feed(Answered(Call.DECODE, G2, error=error))
    assert AskRoute(G3, (D1, D2), PULL_3) in play.effects


def test_kv_that_cannot_be_fetched_is_prefilled_again() -> None:
    play = Play()
    play.feed(WorkerGone(D1, "killed"))
    play.feed(Routed(G2, staged_route(2)))
    play.feed(Answered(Call.DECODE, G2))
    play.token(D2, 3, count=0, generation=2, finish=FinishReason.ERROR)
    assert AskRoute(G3, (D1, D2)) in play.effects


def test_kv_that_does_not_come_in_time_is_prefilled_again() -> None:
    play = Play()
    play.feed(WorkerGone(D1, "killed"))
    play.feed(Routed(G2, staged_route(2)))
    due_s = LIMITS.transfer_s + LIMITS.stall_s
    assert play.saga.wake_at_s == due_s
    play.feed(Tick(), at_s=due_s)
    assert play.effects[:2] == [SendCancel(worker("d2"), G2, "replanned"), SendRelease(worker("p1"), G1)] or (
        play.effects[:2] == [SendRelease(worker("p1"), G1), SendCancel(worker("d2"), G2, "replanned")]
    )
    assert AskRoute(G3, (D1, D2)) in play.effects


def test_after_an_outage_of_the_bus_the_staged_kv_is_fetched_again() -> None:
    play = Play()
    play.feed(BusBack())
    play.feed(Tick(), at_s=play.saga.wake_at_s)
    assert AskRoute(G2, (), PULL_2) in play.effects


def test_the_producers_death_after_its_hand_over_loses_nothing() -> None:
    play = Play()
    play.feed(WorkerGone(P1, "killed"))
    play.feed(WorkerGone(D1, "killed"))
    play.feed(Routed(G2, staged_route(2)))
    rest_of(play, D2, 2)


def test_a_planner_that_knows_nothing_of_staged_kv_is_asked_without() -> None:
    play = Play()
    play.feed(WorkerGone(D1, "killed"))
    play.feed(RouteFailed(G2, ProtocolViolation("unknown field 'staged'")))
    assert play.effects == [SendRelease(worker("p1"), G1), AskRoute(G3, (D1,))]


def test_a_worker_that_was_only_paused_is_not_left_out_any_more() -> None:
    play = Play()
    play.feed(WorkerGone(D1, "no heartbeat", certain=False))
    assert play.effects[1] == AskRoute(G2, (D1,), PULL_2)
    play.feed(RouteFailed(G2, Unavailable("nobody")))
    play.feed(WorkerBack(D1))
    play.feed(Tick(), at_s=play.saga.wake_at_s)
    assert play.effects == [AskRoute(G3, (), PULL_2)]
    play.feed(Routed(G3, staged_route(1)))
    rest_of(play, D1, 3)


def test_a_worker_that_is_certainly_dead_stays_left_out() -> None:
    play = Play()
    play.feed(WorkerGone(D1, "killed"))
    play.feed(RouteFailed(G2, Unavailable("nobody")))
    play.feed(WorkerBack(D1))
    play.feed(Tick(), at_s=play.saga.wake_at_s)
    assert play.effects == [AskRoute(G3, (D1,), PULL_2)]


# -- moves


@pytest.mark.parametrize("ticket_first", [True, False])
@pytest.mark.parametrize("aggregated", [True, False])
def test_a_sequence_that_is_asked_to_moves_and_its_stream_goes_on(aggregated: bool, ticket_first: bool) -> None:
    play = Play(aggregated=aggregated)
    play.feed(MOVE)
    assert play.effects == [AskRoute(G2, (D1,), moving=MOVE)]
    play.token(D1, 3)
    assert play.tokens == [token_at(i) for i in range(4)], "it decodes until it is paused"
    play.feed(Routed(G2, staged_route(2)))
    assert play.effects == [Save(worker("d1"), G1, G2, LIMITS.transfer_s, DEADLINE_S)]
    play.token(D1, 4)
    events: list[Event] = [Answered(Call.SAVE, G2, MOVED)]
    handoff = SequenceEvent(request_id=RequestId("r"), generation=G1, output_index=5, finish=FinishReason.HANDOFF)
    events.insert(1 if ticket_first else 0, Output(D1, handoff))
    play.feed(events[0])
    assert play.effects == []
    play.feed(events[1])
    output = tuple(token_at(i) for i in range(5))
    submit = Submit(Role.DECODE, worker("d2"), G2, output, MOVED, LIMITS.transfer_s)
    earlier = [] if aggregated else [SendRelease(worker("p1"), G1)]
    assert play.effects == [Noted("moved"), *earlier, submit]
    assert play.saga.attempts == 1, "nobody has failed"
    play.feed(Answered(Call.DECODE, G2))
    rest_of(play, D2, 2)
    assert SendRelease(worker("d1"), G1) in play.effects


@pytest.mark.parametrize("answer", [make_route(2), make_route(2, aggregated=True), staged_route(1)])
def test_without_anybody_to_fetch_it_the_sequence_stays(answer: object) -> None:
    play = Play()
    play.feed(MOVE)
    play.feed(Routed(G2, answer))  # type: ignore[arg-type]
    assert play.effects == [Noted("stayed")]
    rest_of(play, D1, 1)


def test_without_a_route_the_sequence_stays() -> None:
    play = Play()
    play.feed(MOVE)
    assert play.feed(RouteFailed(G2, NoCapacity("full"))) == [Noted("stayed")]
    rest_of(play, D1, 1)


def test_a_worker_that_cannot_give_it_away_keeps_it_and_may_be_asked_again() -> None:
    play = Play().moving()
    assert play.feed(Answered(Call.SAVE, G2, error=Unavailable("not this engine"))) == [Noted("stayed")]
    play.token(D1, 3)
    assert play.feed(MOVE) == [AskRoute(G3, (D1,), moving=MOVE)]
    rest_of(play, D1, 1)


def test_a_copy_that_fails_after_the_answer_leaves_it_where_it_is() -> None:
    play = Play(max_tokens=40).moving()
    play.feed(Answered(Call.SAVE, G2, MOVED))
    play.token(D1, 3)
    assert play.saga.moving
    steps = int(MOVE_S / LIMITS.stall_s * 2)
    for step in range(1, steps + 1):
        at_s, index = step * MOVE_S / steps, 3 + step
        event = SequenceEvent(
            request_id=RequestId("r"), generation=G1, output_index=index, token_ids=(token_at(index),)
        )
        play.feed(Output(D1, event), at_s=at_s)
        assert play.saga.moving
    assert play.feed(Tick(), at_s=MOVE_S) == [Noted("stayed")]
    assert play.tokens == [token_at(i) for i in range(4 + steps)]
    assert not play.saga.over


def test_a_hand_over_without_a_ticket_goes_back_to_the_prompts_kv() -> None:
    play = Play().moving()
    play.token(D1, 3, count=0, finish=FinishReason.HANDOFF)
    play.feed(Answered(Call.SAVE, G2, error=DeadlineExceeded("the answer was lost")))
    assert play.effects[0] == Noted("stayed")
    assert AskRoute(G3, (D1,), PULL_2) in play.effects
    assert SendCancel(worker("d1"), G1, "replanned") in play.effects, "what it staged is freed"


def test_a_source_that_dies_on_the_way_is_resumed_from_the_prompts_kv() -> None:
    play = Play().moving()
    play.feed(WorkerGone(D1, "killed"))
    assert AskRoute(G3, (D1,), PULL_2) in play.effects
    play.feed(Routed(G3, staged_route(3)))
    rest_of(play, D3, 3)


def test_a_source_that_dies_once_all_is_staged_is_not_missed() -> None:
    play = Play().moved()
    assert play.feed(WorkerGone(D1, "killed")) == []
    rest_of(play, D2, 2)


def test_moved_kv_is_fetched_by_another_if_the_destination_fails() -> None:
    play = Play().moved()
    play.feed(WorkerGone(D2, "killed"))
    assert play.effects[0] == AskRoute(G3, (D2,), MOVED.model_copy(update={"pull": 2}))
    play.feed(Routed(G3, staged_route(3)))
    play.token(D3, 3, generation=3)
    rest_of(play, D3, 3)
    assert SendRelease(worker("d1"), G1) in play.effects


def test_a_gap_before_the_hand_over_is_not_covered_up() -> None:
    play = Play().moving()
    play.feed(Answered(Call.SAVE, G2, MOVED))
    play.token(D1, 4, count=0, finish=FinishReason.HANDOFF)
    assert isinstance(play.effects[-1], Replanned), "token 3 was lost on the bus"
    assert play.tokens == [token_at(i) for i in range(3)]


def test_a_client_that_leaves_in_mid_move_frees_everybody() -> None:
    play = Play().moved()
    play.feed(ClientGone())
    cancels = [effect for effect in play.effects if isinstance(effect, SendCancel)]
    assert [(cancel.worker.worker_id, cancel.generation) for cancel in cancels] == [("d1", 1), ("d2", 2)]


def test_nobody_else_is_moved_and_no_one_who_has_not_begun_or_is_about_to_end() -> None:
    play = Play()
    assert play.feed(MoveWanted(D2, TICKET.source, "m", "form")) == []
    play.token(D1, 3, count=6)
    assert play.feed(MOVE) == [], "one more token is not worth it"
    play.feed(WorkerGone(D1, "killed"))
    play.feed(Routed(G2, staged_route(2)))
    assert play.feed(MoveWanted(D2, TICKET.source, "m", "form")) == []


def test_late_words_of_the_source_change_nothing() -> None:
    play = Play().moved()
    assert play.token(D1, 2) == []
    assert play.token(D1, 3, count=0, finish=FinishReason.HANDOFF) == []
    assert play.feed(Answered(Call.SAVE, G2, MOVED)) == []
    rest_of(play, D2, 2)


def test_no_start_is_ever_sent_to_one_who_resumes() -> None:
    play = Play().moved()
    play.feed(Answered(Call.DECODE, G2))
    play.token(D2, 3, generation=2)
    assert not any(isinstance(effect, Start) for effect in play.effects)
