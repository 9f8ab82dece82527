from __future__ import annotations

import pytest

from isthmus_planner.routing.explain import KEPT_ROUTES, Explanations
from isthmus_planner.routing.policy import ModePolicy, Policy
from isthmus_planner.routing.view import View
from isthmus_shared.errors import IsthmusError, NoCapacity, Unavailable
from isthmus_shared.ids import RequestId, choice_id
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.outcomes import Outcome
from isthmus_testing.clusters import PLANNER, ask, known, life, view_of, worker

WORKERS = (
    worker("p1", Role.PREFILL, prefill_rate=1000.0),
    worker("p2", Role.PREFILL, prefill_rate=900.0),
    worker("d1", Role.DECODE, step_s=0.02),
    worker("d2", Role.DECODE, step_s=0.01, running=1),
)


def routed(view: View, name: str = "r") -> Explanations:
    kept = Explanations(PLANNER)
    choice = kept.choose(ask(1000, name=name), view, known, 1.0)
    view.commit(choice, 1.0)
    kept.committed(choice.request.request_id)
    return kept


def test_a_route_is_told_with_everything_that_was_weighed_best_first() -> None:
    view = view_of(WORKERS)
    kept = Explanations(PLANNER)
    choice = kept.choose(ask(1000), view, known, 1.0)
    (told,) = kept.of(RequestId("r"), 3.5)
    assert (told.age_s, told.isl_tokens, told.planner) == (2.5, 1000, PLANNER)
    assert told.chosen == told.candidates[0]
    assert told.chosen is not None
    assert told.chosen.predicted == choice.predicted
    totals = [sum(candidate.scores.values()) for candidate in told.candidates]
    assert totals == sorted(totals)
    assert totals[0] == pytest.approx(choice.score_s)
    assert [(c.prefill and c.prefill.worker_id, c.decode.worker_id) for c in told.candidates] == [
        ("p1", "d2"),
        ("p2", "d2"),
        ("p1", "d1"),
        ("p2", "d1"),
    ]
    assert "p2 → d2, most of all by ttft" in told.why
    assert told.outcome is None


def test_an_explanation_tells_of_then_and_not_of_now() -> None:
    view = view_of(WORKERS)
    kept = routed(view)
    before = kept.of(RequestId("r"), 2.0)
    view.beat(worker("p1", Role.PREFILL, queued=100_000, prefill_rate=10.0), 2.0)
    view.lost(life("d2"))
    assert kept.of(RequestId("r"), 2.0) == before


def test_what_really_happened_is_told_with_the_last_route() -> None:
    view = view_of(WORKERS)
    kept = routed(view)
    kept.choose(ask(1000), view, known, 2.0)
    outcome = Outcome(request_id=RequestId("r"), model="demo", isl_tokens=1000, osl_tokens=7, e2el_s=1.5)
    kept.outcome(outcome)
    first, last = kept.of(RequestId("r"), 3.0)
    assert first.outcome is None
    assert last.outcome == outcome


def test_an_ask_that_was_not_carried_out_is_replaced_by_the_next() -> None:
    view, kept = view_of(WORKERS), Explanations(PLANNER)
    for at_s in (1.0, 2.0, 3.0):
        kept.choose(ask(1000), view, known, at_s)
    assert [told.age_s for told in kept.of(RequestId("r"), 4.0)] == [1.0]
    kept.committed(RequestId("r"))
    for at_s in range(5, 20):
        kept.choose(ask(1000), view, known, at_s)
        kept.committed(RequestId("r"))
    assert len(kept.of(RequestId("r"), 30.0)) == KEPT_ROUTES


def test_refusals_in_a_row_do_not_push_out_the_route_before_them() -> None:
    view = view_of(WORKERS)
    kept = routed(view)
    for at_s in range(2, 2 + 2 * KEPT_ROUTES):
        kept.choose(ask(1000), view, known, at_s)
        kept.refused(RequestId("r"), Unavailable("no decode worker"))
    kept.choose(ask(1000), view, known, 30.0)
    kept.committed(RequestId("r"))
    told = kept.of(RequestId("r"), 31.0)
    assert [each.age_s for each in told] == [30.0, 31.0 - (1 + 2 * KEPT_ROUTES), 1.0]
    assert [each.chosen is None for each in told] == [False, True, False]


def test_a_refusal_is_told_with_its_reason() -> None:
    view, kept = view_of(WORKERS[:2]), Explanations(PLANNER)
    with pytest.raises(Unavailable):
        kept.choose(ask(exclude=("p1",)), view, known, 1.0)
    (told,) = kept.of(RequestId("r"), 1.0)
    assert told.chosen is None
    assert "has no decode role" in told.why
    assert told.refusals == {"has just failed this request": 1}


def test_a_choice_that_admission_turned_down_is_told_as_refused_with_its_candidates() -> None:
    view, kept = view_of(WORKERS), Explanations(PLANNER)
    kept.choose(ask(1000), view, known, 1.0)
    error: IsthmusError = NoCapacity("too slow", why="0.2 s over the target")
    kept.refused(RequestId("r"), error)
    (told,) = kept.of(RequestId("r"), 1.0)
    assert (told.chosen, told.why) == (None, error.text)
    assert len(told.candidates) == 4


def test_a_request_is_found_by_what_its_client_knows_it_by() -> None:
    view, kept = view_of(WORKERS), Explanations(PLANNER)
    ids = [choice_id("mine"), choice_id("mine"), choice_id("other")]
    for at_s, name in enumerate(ids):
        kept.choose(ask(name=name), view, known, float(at_s))
    assert [told.request_id for told in kept.of(RequestId("mine"), 9.0)] == ids[:2]
    assert [told.request_id for told in kept.of(ids[1], 9.0)] == ids[1:2]
    assert kept.of(RequestId("nobody's"), 9.0) == ()


def test_only_the_latest_are_kept() -> None:
    view, kept = view_of(WORKERS), Explanations(PLANNER, keep=3)
    for number in range(5):
        kept.choose(ask(name=f"c{number}~x"), view, known, float(number))
    assert len(kept) == 3
    assert [bool(kept.of(RequestId(f"c{number}"), 9.0)) for number in range(5)] == [False, False, True, True, True]


def test_lone_workers_are_among_the_candidates_where_they_were_weighed() -> None:
    view = view_of(WORKERS, Policy(mode=ModePolicy.AUTO))
    (told,) = routed(view).of(RequestId("r"), 1.0)
    assert {candidate.mode.value for candidate in told.candidates} == {"aggregated", "disaggregated"}


def test_of_many_candidates_the_best_are_told_and_the_rest_counted() -> None:
    crowd = [worker(f"{role.value[0]}{index:02}", role, running=index) for role in Role for index in range(20)]
    (told,) = routed(view_of(crowd)).of(RequestId("r"), 1.0)
    assert len(told.candidates) == 16
    assert told.not_shown == 400 - 16
