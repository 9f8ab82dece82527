"""Routes while no planner answers."""

from __future__ import annotations

from collections import Counter

from isthmus_ingress.last_plan import SILENT_S, LastPlan
from isthmus_shared.ids import Incarnation, RequestId
from isthmus_shared.messages.route import Mode, ModelPlan, PlannedPair, Prediction, RoutePlan, RouteRequest
from isthmus_testing.saga_world import LIMITS, worker

VALID_S = 30.0
_PREDICTED = Prediction(ttft_p50_s=0, ttft_p90_s=0, itl_p50_s=0, itl_p90_s=0, calibrated=False)


def pair(prefill: str | None, decode: str, *, weight: float = 1.0, context: int = 4096) -> PlannedPair:
    return PlannedPair(
        prefill=None if prefill is None else worker(prefill),
        decode=worker(decode),
        weight=weight,
        max_context_tokens=context,
        deadlines=LIMITS,
        predicted=_PREDICTED,
    )


def plan(*pairs: PlannedPair, model: str = "demo") -> RoutePlan:
    return RoutePlan(planner=Incarnation("planner"), valid_s=VALID_S, models=(ModelPlan(model=model, pairs=pairs),))


def ask(*, isl: int = 100, model: str = "demo", exclude: tuple[str, ...] = ()) -> RouteRequest:
    return RouteRequest(
        request_id=RequestId("r"),
        model=model,
        isl_tokens=isl,
        max_osl_tokens=1,
        exclude=tuple(Incarnation(f"life-{name}") for name in exclude),
    )


def taken(*pairs: PlannedPair) -> LastPlan:
    last = LastPlan()
    last.take(plan(*pairs), now_s=0.0)
    return last


def names(last: LastPlan, count: int) -> list[str]:
    routes = [last.route(ask(), now_s=1.0) for _ in range(count)]
    return [route.decode.worker_id for route in routes if route is not None]


def test_each_pair_gets_its_share_evenly_spread() -> None:
    last = taken(pair("p1", "d1", weight=3), pair("p1", "d2", weight=1))
    chosen = names(last, 400)
    assert Counter(chosen) == {"d1": 300, "d2": 100}
    assert all("d2" in chosen[i : i + 4] for i in range(0, 400, 4)), "not three hundred of one and then the other"


def test_a_plan_that_comes_again_goes_on_where_the_last_one_was() -> None:
    last = LastPlan()
    pairs = (pair("p1", "d1", weight=3), pair("p1", "d2", weight=1))
    chosen = []
    for _ in range(40):
        last.take(plan(*pairs), now_s=0.0)
        chosen += names(last, 1)
    assert Counter(chosen) == {"d1": 30, "d2": 10}


def test_it_is_used_no_longer_than_it_is_valid() -> None:
    last = taken(pair("p1", "d1"))
    assert last.route(ask(), now_s=VALID_S) is not None
    assert last.route(ask(), now_s=VALID_S + 0.01) is None
    assert LastPlan().route(ask(), now_s=0.0) is None


def test_it_leaves_out_who_may_not_serve_the_request() -> None:
    last = taken(pair("p1", "d1"), pair(None, "d2", context=200))
    route = last.route(ask(exclude=("p1",)), now_s=1.0)
    assert route is not None
    assert (route.mode, route.prefill, route.decode.worker_id) == (Mode.AGGREGATED, None, "d2")
    assert last.route(ask(exclude=("p1",), isl=200), now_s=1.0) is None
    assert last.route(ask(model="another"), now_s=1.0) is None


def test_a_worker_that_has_died_since_is_left_out_until_the_next_plan() -> None:
    last = taken(pair("p1", "d1"), pair("p1", "d2"))
    last.gone(Incarnation("life-d1"))
    assert set(names(last, 6)) == {"d2"}
    last.take(plan(pair("p1", "d1"), pair("p1", "d2")), now_s=0.0)
    assert set(names(last, 6)) == {"d1", "d2"}


def test_a_silent_planner_is_not_asked_for_a_while_and_its_next_plan_ends_that() -> None:
    last = taken(pair("p1", "d1"))
    assert not last.planner_is_silent(now_s=1.0)
    last.silence(now_s=1.0)
    assert last.planner_is_silent(now_s=1.0 + 0.9 * SILENT_S)
    assert not last.planner_is_silent(now_s=1.0 + SILENT_S)
    last.silence(now_s=3.0)
    last.take(plan(pair("p1", "d1")), now_s=3.1)
    assert not last.planner_is_silent(now_s=3.2)


def test_without_a_plan_even_a_silent_planner_is_asked() -> None:
    last = LastPlan()
    last.silence(now_s=1.0)
    assert not last.planner_is_silent(now_s=1.1)
