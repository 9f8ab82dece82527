"""The saga, one situation at a time."""

from __future__ import annotations

import pytest

from isthmus_ingress.saga import Saga
from isthmus_ingress.saga_parties import RESYNC_S
from isthmus_ingress.saga_routing import ROUTE_RETRY_S
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
    Output,
    Replanned,
    Routed,
    RouteFailed,
    SagaState,
    SendCancel,
    SendRelease,
    Start,
    StopFound,
    Submit,
    Tick,
    WorkerGone,
)
from isthmus_shared.errors import (
    BusDisconnected,
    Cancelled,
    DeadlineExceeded,
    Fault,
    IsthmusError,
    ModelNotFound,
    NoCapacity,
    NoResponders,
    Unavailable,
)
from isthmus_shared.ids import Generation, Incarnation, RequestId
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.quick import QuickEvent
from isthmus_shared.messages.work import FinishReason, SequenceEvent
from isthmus_testing.saga_world import LIMITS, TICKET, make_route, staged_route, token_at, worker

PATIENCE_S = 4.0
PULL_2, PULL_3 = (TICKET.model_copy(update={"pull": pull}) for pull in (2, 3))
P1, D1, D2 = (Incarnation(f"life-{name}") for name in ("p1", "d1", "d2"))


class Play:
    """A saga fed by hand at literal times; `effects` are those of the last event."""

    def __init__(self, *, max_tokens: int = 10, attempts: int = 3, deadline_s: float = 100.0) -> None:
        self.saga = Saga(
            max_tokens=max_tokens, deadline_s=deadline_s, max_attempts=attempts, route_patience_s=PATIENCE_S
        )
        self.now_s = 0.0
        self.effects: list[Effect] = []
        self.tokens: list[int] = []

    def feed(self, event: Event, *, at_s: float | None = None) -> list[Effect]:
        self.now_s = self.now_s if at_s is None else at_s
        self.effects = self.saga.handle(event, now_s=self.now_s)
        self.saga.check_invariants()
        self.tokens += [token for effect in self.effects if isinstance(effect, Deliver) for token in effect.token_ids]
        return self.effects

    def kinds(self) -> list[type[Effect]]:
        return [type(effect) for effect in self.effects]

    def token(
        self,
        life: Incarnation,
        index: int,
        *,
        count: int = 1,
        finish: FinishReason | None = None,
        generation: int = 1,
        fault: Fault | None = None,
    ) -> list[Effect]:
        tokens = tuple(token_at(i) for i in range(index, index + count))
        event = SequenceEvent(
            request_id=RequestId("r"),
            generation=Generation(generation),
            output_index=index,
            token_ids=tokens,
            finish=finish,
            fault=fault,
        )
        return self.feed(Output(life, event))

    def error(self, generation: int = 1) -> IsthmusError | None:
        end = self.effects[-1]
        assert isinstance(end, End)
        return end.error

    def crossing(self) -> Play:
        """Routed, prefill accepted, decode asked."""
        self.feed(Begin())
        self.feed(Routed(Generation(1), make_route(1)))
        self.feed(Answered(Call.PREFILL, Generation(1), TICKET))
        return self

    def decoding(self) -> Play:
        """And three tokens delivered, the last two from decode."""
        self.crossing()
        self.feed(Answered(Call.DECODE, Generation(1)))
        self.token(P1, 0, finish=FinishReason.HANDOFF)
        self.feed(Answered(Call.START, Generation(1)))
        self.token(D1, 1, count=2)
        assert self.tokens == [token_at(0), token_at(1), token_at(2)]
        return self


def test_a_request_goes_through_all_its_states() -> None:
    play = Play()
    play.feed(Begin())
    assert play.effects == [AskRoute(Generation(1), ())]
    play.feed(Routed(Generation(1), make_route(1)))
    assert play.effects == [Submit(Role.PREFILL, worker("p1"), Generation(1), (), None, LIMITS.transfer_s, 100.0)]
    assert play.saga.state is SagaState.PREFILLING
    play.feed(Answered(Call.PREFILL, Generation(1), TICKET))
    assert play.effects == [Submit(Role.DECODE, worker("d1"), Generation(1), (), TICKET, LIMITS.transfer_s)]
    assert play.saga.state is SagaState.CROSSING
    play.feed(Answered(Call.DECODE, Generation(1)))
    assert play.effects == []
    play.token(P1, 0, finish=FinishReason.HANDOFF)
    assert play.kinds() == [Deliver, Start]
    assert play.saga.state is SagaState.DECODING
    play.token(D1, 1)
    play.feed(Answered(Call.START, Generation(1)))
    play.token(D1, 2, finish=FinishReason.STOP)
    assert play.kinds() == [Deliver, SendRelease, End], "nobody is cancelled, and nobody may want the KV again"
    assert play.effects[1] == SendRelease(worker("p1"), Generation(1))
    assert play.saga.state is SagaState.DONE


def test_the_first_token_may_come_before_the_ticket() -> None:
    play = Play()
    play.feed(Begin())
    play.feed(Routed(Generation(1), make_route(1)))
    play.token(P1, 0, finish=FinishReason.HANDOFF)
    assert play.kinds() == [Deliver], "the client has it now"
    play.feed(Answered(Call.PREFILL, Generation(1), TICKET))
    assert play.kinds() == [Submit]
    play.feed(Answered(Call.DECODE, Generation(1)))
    assert play.effects == [Start(worker("d1"), Generation(1), token_at(0))]


def test_an_answer_that_ends_at_its_first_token_cancels_the_decode_side() -> None:
    play = Play().crossing()
    play.token(P1, 0, finish=FinishReason.STOP)
    assert play.effects[1:] == [SendCancel(worker("d1"), Generation(1), "finished"), End(FinishReason.STOP, None)]
    play.feed(Answered(Call.DECODE, Generation(1)))
    assert play.effects == [SendCancel(worker("d1"), Generation(1), "finished")], "it may not have known then"


def test_decode_may_learn_of_an_end_at_the_first_token_before_the_ingress_does() -> None:
    play = Play().crossing()
    cut_off = Cancelled("the sequence ended with its first token").to_fault()
    play.token(D1, 0, count=0, finish=FinishReason.ERROR, fault=cut_off)
    assert play.effects == [], "the first token is on its way"
    play.token(P1, 0, finish=FinishReason.STOP)
    assert play.effects[1:] == [End(FinishReason.STOP, None)]
    assert play.tokens == [token_at(0)]


def test_one_token_asks_for_no_decode() -> None:
    play = Play(max_tokens=1)
    play.feed(Begin())
    play.feed(Routed(Generation(1), make_route(1)))
    play.feed(Answered(Call.PREFILL, Generation(1), TICKET))
    assert play.effects == []
    play.token(P1, 0, finish=FinishReason.LENGTH)
    assert play.kinds() == [Deliver, End]


def test_a_lost_decode_worker_is_replaced_and_goes_on_where_the_client_is() -> None:
    play = Play().decoding()
    play.feed(WorkerGone(D1, "killed"))
    assert play.kinds() == [AskRoute, Replanned], "prefill's KV was consumed, and the dead need no Cancel"
    assert play.effects[0] == AskRoute(Generation(2), (D1,), PULL_2)
    play.feed(Routed(Generation(2), make_route(2)))
    assert play.effects[0] == SendRelease(worker("p1"), Generation(1)), "the planner found nobody who could fetch it"
    submit = play.effects[1]
    assert isinstance(submit, Submit)
    assert submit.output == tuple(token_at(i) for i in range(3))
    play.feed(Answered(Call.PREFILL, Generation(2), TICKET))
    play.feed(Answered(Call.DECODE, Generation(2)))
    play.token(Incarnation("life-p2"), 3, generation=2, finish=FinishReason.HANDOFF)
    assert Start(worker("d2"), Generation(2), token_at(3)) in play.effects
    play.token(D2, 4, count=6, generation=2, finish=FinishReason.LENGTH)
    assert play.tokens == [token_at(i) for i in range(10)]


def test_a_silent_worker_is_cancelled_since_it_may_come_back() -> None:
    play = Play().decoding()
    play.feed(WorkerGone(D1, "no heartbeat", certain=False))
    assert play.effects[0] == SendCancel(worker("d1"), Generation(1), "replanned")


def test_a_prefill_worker_that_dies_after_its_hand_over_changes_nothing() -> None:
    play = Play().crossing()
    play.token(P1, 0, finish=FinishReason.HANDOFF)
    play.feed(WorkerGone(P1, "killed"))
    assert play.effects == []
    play.feed(Answered(Call.DECODE, Generation(1)))
    assert play.kinds() == [Start]


@pytest.mark.parametrize("asked", [False, True])
def test_a_decode_worker_that_dies_during_the_prefill_does_not_end_it(asked: bool) -> None:
    play = Play().crossing() if asked else Play()
    if not asked:
        play.feed(Begin())
        play.feed(Routed(Generation(1), make_route(1)))
    assert play.feed(WorkerGone(D1, "killed")) == []
    if not asked:
        assert play.feed(Answered(Call.PREFILL, Generation(1), TICKET)) == [], "nobody is asked to fetch it"
    play.token(P1, 0, finish=FinishReason.HANDOFF)
    assert play.tokens == [token_at(0)], "the client has its first token all the same"
    staged = PULL_2 if asked else TICKET
    assert play.effects[1] == AskRoute(Generation(2), (D1,), staged)
    play.feed(Routed(Generation(2), staged_route(2)))
    submit = play.effects[-1]
    assert submit == Submit(Role.DECODE, worker("d2"), Generation(2), (token_at(0),), staged, LIMITS.transfer_s)
    play.token(D2, 1, generation=2)
    assert play.tokens == [token_at(0), token_at(1)]


def test_a_decode_worker_that_dies_during_the_prefill_matters_not_if_the_first_token_is_the_last() -> None:
    play = Play().crossing()
    play.feed(WorkerGone(D1, "killed"))
    play.token(P1, 0, finish=FinishReason.STOP)
    assert play.effects[-1] == End(FinishReason.STOP, None)


def test_both_may_die_during_the_prefill() -> None:
    play = Play().crossing()
    play.feed(WorkerGone(D1, "killed"))
    play.feed(WorkerGone(P1, "killed"))
    assert play.effects[0] == AskRoute(Generation(2), (P1,)), "what it had staged was not sealed"


def test_a_route_over_a_worker_known_to_be_lost_is_not_taken() -> None:
    play = Play().decoding()
    play.feed(WorkerGone(D1, "killed"))
    assert play.feed(Routed(Generation(2), make_route(1))) == [], "the planner was told, and gets time to see it"
    play.feed(Tick(), at_s=ROUTE_RETRY_S)
    assert play.effects == [AskRoute(Generation(3), (D1,), PULL_2)]


def test_the_planner_is_told_at_once_of_a_loss_that_it_does_not_know_of() -> None:
    play = Play()
    play.feed(Begin())
    play.feed(WorkerGone(D1, "killed"))
    play.feed(Routed(Generation(1), make_route(1)))
    assert play.effects == [AskRoute(Generation(2), (D1,))]


def test_a_duplicate_is_dropped_and_an_overlap_gives_only_what_is_new() -> None:
    play = Play().decoding()
    play.token(D1, 1, count=2)
    assert play.effects == []
    play.token(D1, 2, count=3)
    assert play.tokens == [token_at(i) for i in range(5)]


def test_a_gap_is_replanned_without_blaming_a_worker() -> None:
    play = Play().decoding()
    play.token(D1, 4)
    assert play.effects[:2] == [
        SendCancel(worker("d1"), Generation(1), "replanned"),
        AskRoute(Generation(2), (), PULL_2),
    ]


def test_another_generations_tokens_are_dropped() -> None:
    play = Play().decoding()
    play.token(D1, 5)  # a gap: generation 2 begins
    play.feed(Routed(Generation(2), make_route(1, aggregated=True)))
    assert play.token(D1, 3, generation=1) == []
    assert play.kinds() == []
    play.token(D1, 3, generation=2)
    assert play.kinds() == [Deliver]


@pytest.mark.parametrize("error", [NoCapacity("full"), NoResponders("nobody")])
def test_a_refusal_holds_nothing_and_is_replanned_at_once(error: IsthmusError) -> None:
    play = Play().crossing()
    play.token(P1, 0, finish=FinishReason.HANDOFF)
    play.feed(Answered(Call.DECODE, Generation(1), error=error))
    assert play.effects[0] == AskRoute(Generation(2), (D1,), PULL_2), "what is staged is as good as it was"


def test_a_submit_without_an_answer_is_cancelled_since_it_may_be_held() -> None:
    play = Play()
    play.feed(Begin())
    play.feed(Routed(Generation(1), make_route(1)))
    play.feed(Answered(Call.PREFILL, Generation(1), error=DeadlineExceeded("late")))
    assert play.effects[0] == SendCancel(worker("p1"), Generation(1), "replanned")


def test_no_first_token_within_ttft_blames_prefill() -> None:
    play = Play().crossing()
    assert play.saga.wake_at_s == LIMITS.ttft_s
    play.feed(Tick(), at_s=LIMITS.ttft_s)
    assert AskRoute(Generation(2), (P1,)) in play.effects


def test_kv_that_does_not_arrive_blames_decode() -> None:
    play = Play().crossing()
    play.token(P1, 0, finish=FinishReason.HANDOFF)
    due_s = LIMITS.transfer_s + LIMITS.stall_s
    assert play.saga.wake_at_s == due_s
    play.feed(Tick(), at_s=due_s)
    assert AskRoute(Generation(2), (D1,)) in play.effects


def test_a_stalled_stream_is_replanned_after_stall_s() -> None:
    play = Play().decoding()
    assert play.saga.wake_at_s == LIMITS.stall_s
    assert play.feed(Tick(), at_s=LIMITS.stall_s - 0.01) == []
    play.feed(Tick(), at_s=LIMITS.stall_s)
    assert AskRoute(Generation(2), (D1,), PULL_2) in play.effects


def test_an_attempt_that_is_heard_once_the_bus_is_back_goes_on() -> None:
    play = Play().crossing()
    play.feed(BusBack(), at_s=0.5)
    assert play.saga.wake_at_s == 0.5 + RESYNC_S
    play.token(P1, 0, finish=FinishReason.HANDOFF)
    assert play.saga.wake_at_s == LIMITS.transfer_s + LIMITS.stall_s
    assert play.feed(Tick(), at_s=0.5 + RESYNC_S) == []


def test_an_attempt_that_is_not_heard_once_the_bus_is_back_is_replanned_and_nobody_blamed() -> None:
    play = Play().crossing()
    play.feed(BusBack(), at_s=0.5)
    play.feed(Tick(), at_s=0.5 + RESYNC_S)
    assert AskRoute(Generation(2), ()) in play.effects
    play.feed(Routed(Generation(2), make_route(2)))
    assert play.saga.wake_at_s == play.now_s + LIMITS.ttft_s, "the next one has all the time that it needs"


def test_the_requests_own_deadline_ends_it() -> None:
    play = Play(deadline_s=1.0).decoding()
    play.feed(Tick(), at_s=1.0)
    assert play.effects[:2] == [
        SendRelease(worker("p1"), Generation(1)),
        SendCancel(worker("d1"), Generation(1), "deadline"),
    ]
    assert isinstance(play.error(), DeadlineExceeded)


def test_the_last_attempts_error_is_the_clients() -> None:
    play = Play(attempts=2).decoding()
    play.token(D1, 5)
    play.feed(Routed(Generation(2), make_route(2, aggregated=True)))
    play.feed(Answered(Call.DECODE, Generation(2), error=NoCapacity("full")))
    assert isinstance(play.error(), NoCapacity)


NO_ROUTES = [Unavailable("x"), NoCapacity("x"), NoResponders("x"), BusDisconnected("x"), DeadlineExceeded("x")]


@pytest.mark.parametrize("error", NO_ROUTES)
def test_a_first_route_is_asked_for_twice(error: IsthmusError) -> None:
    play = Play()
    play.feed(Begin())
    assert play.feed(RouteFailed(Generation(1), error)) == []
    play.feed(Tick(), at_s=ROUTE_RETRY_S)
    assert play.effects == [AskRoute(Generation(2), ())]
    play.feed(RouteFailed(Generation(2), error))
    assert play.error() is error


@pytest.mark.parametrize("error", NO_ROUTES)
def test_a_replan_waits_for_a_route_and_no_attempt_is_lost_by_that(error: IsthmusError) -> None:
    play = Play(attempts=2).decoding()
    play.feed(WorkerGone(D1, "killed"), at_s=1.0)
    generation = Generation(2)
    while play.now_s < 1.0 + PATIENCE_S - ROUTE_RETRY_S:
        assert play.feed(RouteFailed(generation, error)) == []
        generation = Generation(generation + 1)
        play.feed(Tick(), at_s=play.now_s + ROUTE_RETRY_S)
        assert play.effects == [AskRoute(generation, (D1,), PULL_2)], "each question is fenced from the last"
    assert generation > 5
    play.feed(Routed(generation, make_route(2, aggregated=True)))
    play.token(D2, 3, count=7, generation=generation, finish=FinishReason.LENGTH)
    assert play.tokens == [token_at(i) for i in range(10)]


def test_a_replan_waits_no_longer_than_its_patience() -> None:
    play = Play().decoding()
    play.feed(WorkerGone(D1, "killed"), at_s=1.0)
    assert play.feed(RouteFailed(Generation(2), Unavailable("nobody"))) == []
    play.feed(Tick(), at_s=1.0 + PATIENCE_S)
    play.feed(RouteFailed(Generation(3), Unavailable("nobody")))
    assert isinstance(play.error(), Unavailable)


def test_a_route_that_can_never_be_is_not_asked_for_again() -> None:
    play = Play().decoding()
    play.feed(WorkerGone(D1, "killed"))
    play.feed(RouteFailed(Generation(2), ModelNotFound("gone")))
    assert isinstance(play.error(), ModelNotFound)


def test_a_late_answer_to_an_earlier_question_is_not_taken() -> None:
    play = Play().decoding()
    play.feed(WorkerGone(D1, "killed"))
    play.feed(RouteFailed(Generation(2), DeadlineExceeded("late")))
    play.feed(Tick(), at_s=ROUTE_RETRY_S)
    assert play.feed(Routed(Generation(2), make_route(2))) == []


@pytest.mark.parametrize(("event", "reason"), [(ClientGone(), "client_gone"), (StopFound(), "finished")])
def test_every_party_spoken_to_is_cancelled_when_nobody_wants_more(event: Event, reason: str) -> None:
    play = Play().crossing()
    play.token(P1, 0, finish=FinishReason.HANDOFF)
    play.feed(event)
    cancels = [effect for effect in play.effects if isinstance(effect, SendCancel)]
    assert [(cancel.worker.worker_id, cancel.reason) for cancel in cancels] == [("p1", reason), ("d1", reason)]
    assert play.feed(event) == [], "once"
    play.token(P1, 1)
    assert play.effects == []


def test_a_worker_that_ends_a_request_unasked_is_replaced() -> None:
    play = Play().decoding()
    play.token(D1, 3, count=0, finish=FinishReason.CANCELLED)
    assert play.kinds() == [AskRoute, Replanned]


def test_an_error_that_no_other_worker_could_avoid_is_not_retried() -> None:
    play = Play().decoding()
    fault = Fault(code="invalid_request", what="never")
    play.token(D1, 3, count=0, finish=FinishReason.ERROR, fault=fault)
    assert play.kinds() == [SendRelease, End]


def test_more_tokens_than_asked_for_are_cut() -> None:
    play = Play(max_tokens=4).decoding()
    play.token(D1, 3, count=3)
    assert play.tokens == [token_at(i) for i in range(4)]
    assert play.effects[-2:] == [SendCancel(worker("d1"), Generation(1), "finished"), End(FinishReason.LENGTH, None)]


def quick(index: int, tokens: tuple[int, ...], generation: int = 1) -> QuickEvent:
    return QuickEvent(RequestId("r"), Generation(generation), index, tokens)


def test_usual_tokens_may_be_taken_the_short_way_and_count_as_heard() -> None:
    play = Play().decoding()
    play.feed(BusBack(), at_s=0.5)
    assert play.saga.flow is not None
    assert play.saga.flow.take(D1, quick(3, (7, 8)), 1.0)
    assert list(play.saga.output[3:]) == [7, 8]
    assert play.feed(Tick(), at_s=0.5 + RESYNC_S) == [], "it was heard after the bus came back"
    assert play.saga.wake_at_s == 1.0 + LIMITS.stall_s


@pytest.mark.parametrize(
    ("life", "event"),
    [
        (P1, quick(3, (7,))),
        (D1, quick(3, (7,), generation=2)),
        (D1, quick(2, (7,))),
        (D1, quick(4, (7,))),
        (D1, quick(3, ())),
        (D1, quick(3, tuple(range(7)))),
    ],
)
def test_what_is_not_usual_is_left_to_the_saga(life: Incarnation, event: QuickEvent) -> None:
    play = Play(max_tokens=10).decoding()
    assert play.saga.flow is not None
    assert not play.saga.flow.take(life, event, 1.0)
    assert play.tokens == list(play.saga.output)


def test_nobody_flows_before_decode_was_heard_nor_after_the_attempt_has_ended() -> None:
    assert Play().crossing().saga.flow is None
    play = Play().decoding()
    play.feed(WorkerGone(D1, "gone"))
    assert play.saga.flow is None
