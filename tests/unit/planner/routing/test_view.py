from __future__ import annotations

import pytest

from isthmus_planner.config import PlannerConfig
from isthmus_planner.cost.speeds import Pending
from isthmus_planner.ledger import MAX_ASSIGNMENTS, SETTLE_S, Ledger
from isthmus_planner.routing import residents
from isthmus_planner.routing.choose import choose
from isthmus_planner.routing.policy import ModePolicy, Policy
from isthmus_planner.routing.residents import Residents
from isthmus_planner.routing.seat import NO_TARGETS, Correction, Targets
from isthmus_planner.routing.types import Choice
from isthmus_planner.routing.view import View
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.ids import Incarnation, RequestId
from isthmus_shared.messages.health import ProcessState, Role, WorkerHeartbeat
from isthmus_shared.messages.outcomes import Outcome
from isthmus_testing.clusters import PLANNER, ask, known, life, view_of, worker

P, D = worker("p", Role.PREFILL), worker("d", Role.DECODE, step_s=0.01)


def route(view: View, at_s: float = 0.0, **wants: object) -> Choice:
    choice = choose(ask(100, **wants), view, known, PLANNER, at_s)  # type: ignore[arg-type]
    view.commit(choice, at_s)
    view.check_invariants()
    return choice


def ended(name: str, osl: int = 16) -> Outcome:
    return Outcome(request_id=RequestId(name), model="demo", isl_tokens=100, osl_tokens=osl, e2el_s=1.0)


def targets(view: View) -> Targets:
    seat = view.seat(life("d"))
    assert seat is not None
    return seat.targets


def test_a_beat_covers_what_was_routed_well_before_it_and_not_what_is_on_its_way() -> None:
    ledger, one = Ledger(), Incarnation("a")
    assert ledger.add(one, Pending(prefill_tokens=10, sequences=1), 0.0) == Pending(prefill_tokens=10, sequences=1)
    ledger.add(one, Pending(prefill_tokens=7, sequences=1), 1.0 - SETTLE_S / 2)
    assert ledger.beat(one, 1.0) == Pending(prefill_tokens=7, sequences=1)
    ledger.forget(one)
    assert (ledger.pending(one), len(ledger)) == (Pending(), 0)


def test_an_assignment_that_no_beat_covers_is_forgotten_and_so_are_too_many() -> None:
    ledger, one = Ledger(), Incarnation("a")
    ledger.add(one, Pending(sequences=1), 0.0)
    assert ledger.add(one, Pending(sequences=1), 9.0).sequences == 1
    for _ in range(MAX_ASSIGNMENTS + 5):
        ledger.add(one, Pending(sequences=1), 9.0)
    assert len(ledger) == ledger.pending(one).sequences == MAX_ASSIGNMENTS
    ledger.check_invariants()


def test_residents_targets_bind_until_the_outcome_comes() -> None:
    view = view_of((P, D))
    assert targets(view) == NO_TARGETS
    route(view, name="a", itl_s=0.5)
    route(view, name="b", itl_s=0.05)
    assert targets(view) == Targets(0.05, 2)
    view.outcome(ended("b"), 1.0)
    assert targets(view) == Targets(0.5, 1)
    view.outcome(ended("unknown"), 1.0)
    view.outcome(ended("a"), 1.0)
    assert targets(view) == NO_TARGETS


def test_a_request_that_nobody_tells_the_end_of_is_over_when_it_must_be() -> None:
    view = view_of((P, D))
    route(view, name="a", itl_s=0.5)
    route(view, at_s=3.0, name="b")
    assert targets(view).count == 1
    route(view, at_s=1000.0, name="c")
    assert targets(view) == NO_TARGETS


def test_a_worker_that_has_nobody_holds_no_targets() -> None:
    view = view_of((P, D))
    route(view, name="a", itl_s=0.5)
    view.beat(D, SETTLE_S / 2)
    assert targets(view).count == 1, "it is on its way there"
    view.beat(D, 1.0)
    assert targets(view) == NO_TARGETS


def test_a_life_that_was_lost_takes_its_targets_and_what_is_pending_with_it() -> None:
    view = view_of((P, D))
    route(view, name="a", itl_s=0.5)
    view.lost(life("d"))
    view.beat(D, SETTLE_S / 2)
    assert targets(view) == NO_TARGETS
    assert view.ledger.pending(life("d")) == Pending()
    view.outcome(ended("a"), 1.0)
    view.check_invariants()


def test_a_route_that_would_break_a_residents_target_goes_elsewhere() -> None:
    near = worker("d1", Role.DECODE, step_s=0.01, running=1)
    far = worker("d2", Role.DECODE, step_s=0.05, running=1)
    view = view_of((P, near, far), Policy(slo_margin=1.0))
    first = route(view, name="a", osl=200, itl_s=0.0106)
    assert (first.decode.ref.worker_id, first.feasible) == ("d1", True)
    second = choose(ask(100, name="b", osl=200), view, known, PLANNER, 0.0)
    assert second.decode.ref.worker_id == "d2", "one more would make d1 slower than was promised there"
    view.outcome(ended("a"), 1.0)
    view.beat(near, 1.0)
    assert choose(ask(100, name="c", osl=200), view, known, PLANNER, 1.0).decode.ref.worker_id == "d1"


def test_a_choice_that_meets_no_target_says_by_how_much_and_when_it_would() -> None:
    view = view_of((worker("p", Role.PREFILL, queued=2000, prefill_rate=1000.0), D), Policy(slo_margin=1.0))
    choice = choose(ask(100, ttft_s=1.0, itl_s=0.001), view, known, PLANNER, 0.0)
    assert (choice.meets_ttft, choice.meets_itl, choice.feasible) == (False, False, False)
    assert choice.ttft_over_s == pytest.approx(1.1)
    assert choice.predicted_wait_s >= 1.1
    easy = choose(ask(100, ttft_s=60.0, itl_s=1.0), view, known, PLANNER, 0.0)
    assert (easy.feasible, easy.predicted_wait_s) == (True, 0)


def test_answers_teach_how_long_answers_are() -> None:
    view = view_of((P, D))
    assert view.usual_osl_tokens("demo") == 256
    for _ in range(300):
        view.outcome(ended("x", osl=1000), 0.0)
    assert view.usual_osl_tokens("demo") == pytest.approx(1000, rel=0.02)
    view.outcome(ended("x", osl=0), 0.0)
    assert view.usual_osl_tokens("other") == 256


def test_a_correction_goes_with_the_life_that_it_is_about() -> None:
    view = view_of((P, D))
    view.correct(life("nobody"), Correction(2.0, 2.0))
    before = view.seat(life("d"))
    view.correct(life("d"), Correction(2.0, 2.0))
    after = view.seat(life("d"))
    assert before is not None
    assert after is not None
    assert after.itl_s == pytest.approx(2 * before.itl_s)
    view.lost(life("d"))
    view.beat(D, 1.0)
    again = view.seat(life("d"))
    assert again is not None
    assert again.itl_s == before.itl_s
    view.check_invariants()


def test_who_changes_its_role_its_state_or_its_form_is_found_where_it_is_now() -> None:
    view = view_of((P, D))
    route(view)
    changed: list[WorkerHeartbeat] = [
        worker("d", Role.PREFILL),
        worker("d", Role.DECODE, form="bf16"),
        worker("d", Role.DECODE, state=ProcessState.DRAINING),
        worker("d", Role.DECODE, model="other"),
    ]
    for at_s, beat in enumerate(changed):
        view.beat(beat, float(at_s))
        view.check_invariants()
        assert not any(group.prefill.seats and group.decode.seats for group in view.groups("demo"))
    view.beat(D, 9.0)
    assert route(view, at_s=9.0).prefill is not None
    view.keep([life("p")])
    assert len(view) == 1
    view.check_invariants()


def test_only_so_many_residents_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents, "MAX_RESIDENTS", 3)
    known_ones, one = Residents(), Incarnation("a")
    for number in range(50):
        known_ones.add(RequestId(f"r{number}"), one, 0.1 + number, until_s=float(number))
        known_ones.check_invariants()
    assert known_ones.of(one) == Targets(0.1 + 47, 3)
    known_ones.add(RequestId("r48"), one, 0.2, until_s=100.0)
    assert known_ones.of(one) == Targets(0.2, 3), "asked again, it counts once, as it is now"
    assert known_ones.expire(99.0) == {one}
    assert known_ones.of(one) == Targets(0.2, 1)


def test_the_settings_reach_the_policy() -> None:
    environ = {
        "ISTHMUS_PLANNER_MODE": "auto",
        "ISTHMUS_PLANNER_RESIDENTS_WEIGHT": "3",
        "ISTHMUS_PLANNER_SLO_MARGIN": "1.5",
        "ISTHMUS_PLANNER_PRICES": "h100=13.5, d1=2",
    }
    policy = PlannerConfig.load(environ).policy()
    assert (policy.mode, policy.weights.residents, policy.slo_margin) == (ModePolicy.AUTO, 3, 1.5)
    assert policy.prices == {"h100": 13.5, "d1": 2}
    view = view_of((worker("d1", Role.DECODE, vendor="h100"), worker("d2", Role.DECODE, vendor="h100")), policy)
    assert [seat.dollars_per_s for seat in view.seats()] == [2 / 3600, 13.5 / 3600]


@pytest.mark.parametrize("given", ["h100", "=3", "h100=dear", "h100=-1", "h100=inf"])
def test_a_price_that_is_none_is_refused_by_name(given: str) -> None:
    with pytest.raises(ConfigInvalid, match="ISTHMUS_PLANNER_PRICES"):
        PlannerConfig.load({"ISTHMUS_PLANNER_PRICES": given})
