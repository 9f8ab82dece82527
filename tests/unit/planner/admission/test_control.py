"""Admission: go, wait or come back, from what the best route is predicted to do."""

from __future__ import annotations

import dataclasses

import pytest

from isthmus_planner.admission.control import GRACE_S, Admission, AdmissionSettings, Go, Refuse, Wait
from isthmus_planner.deadlines import DeadlinePolicy
from isthmus_planner.routing.types import Choice
from isthmus_shared.errors import IsthmusError, ModelNotFound, SloUnattainable
from isthmus_shared.ids import Incarnation, RequestId
from isthmus_shared.messages.route import Mode, Prediction, RouteRequest, Slo

CHAT = Slo(name="chat", ttft_s=2.0, itl_s=0.05)
BATCH = Slo(name="batch", itl_s=1.0, priority=-10)


def request(name: str, slo: Slo | None = CHAT, **others: object) -> RouteRequest:
    return RouteRequest(
        request_id=RequestId(name), model="m", isl_tokens=100, max_osl_tokens=10, slo=slo, patience_s=1.0
    ).model_copy(update=others)


class Cluster:
    """Room for so many; the first token after `ttft_s`."""

    def __init__(self, room: int = 0, ttft_s: float = 0.5, wait_s: float = 0.5) -> None:
        self.room, self.ttft_s, self.wait_s = room, ttft_s, wait_s

    def choose(self, asked: RouteRequest) -> Choice:
        predicted = Prediction(
            ttft_p50_s=self.ttft_s, ttft_p90_s=self.ttft_s, itl_p50_s=0.01, itl_p90_s=0.01, calibrated=True
        )
        target_s = None if asked.slo is None else asked.slo.ttft_s
        over_s = 0.0 if target_s is None else max(0.0, self.ttft_s + asked.waited_s - target_s)
        return Choice(
            request=asked,
            mode=Mode.AGGREGATED,
            prefill=None,
            decode=None,  # type: ignore[arg-type]  # nobody looks at it here
            predicted=predicted,
            deadlines=DeadlinePolicy().for_prediction(predicted, 0.0),
            score_s=0.0,
            planner=Incarnation("p"),
            ttft_over_s=over_s,
            room=self.room > 0,
            predicted_wait_s=over_s if self.room else max(over_s, self.wait_s),
        )


def admission(**settings: float) -> Admission:
    return Admission(dataclasses.replace(AdmissionSettings(), **settings))


def released(gate: Admission, cluster: Cluster, now_s: float) -> list[tuple[str, type]]:
    found = []
    for asked, decision in gate.release(cluster.choose, now_s):
        found.append((asked.request_id, type(decision)))
        cluster.room -= isinstance(decision, Go)
    gate.check_invariants()
    return found


def test_a_request_without_targets_goes_at_once_even_where_others_wait() -> None:
    gate, cluster = admission(), Cluster()
    assert isinstance(gate.offer(request("a"), cluster.choose, 0.0), Wait)
    assert isinstance(gate.offer(request("b", None), cluster.choose, 0.0), Go)
    assert isinstance(gate.offer(request("c", Slo(name="none")), cluster.choose, 0.0), Go)


def test_what_meets_its_targets_goes_and_what_cannot_is_told_when_to_come_back() -> None:
    gate = admission()
    assert isinstance(gate.offer(request("a"), Cluster(room=1).choose, 0.0), Go)
    refused = gate.offer(request("b"), Cluster(room=1, ttft_s=5.0).choose, 0.0)
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, SloUnattainable)
    assert refused.error.http_status == 429
    assert refused.error.retry_after_s == pytest.approx(3.0)  # by then 5 s have become 2
    gate.check_invariants()
    assert not gate.waiting


def test_waiting_that_is_predicted_to_take_too_long_is_not_begun() -> None:
    gate = admission()
    late = gate.offer(request("a"), Cluster(wait_s=1.6).choose, 0.0)  # 1.5 s are left beside the 0.5 s of prefill
    assert isinstance(late, Refuse)
    assert late.error.retry_after_s == pytest.approx(1.6)
    assert isinstance(gate.offer(request("b"), Cluster(wait_s=1.4).choose, 0.0), Wait)
    assert isinstance(gate.offer(request("c", BATCH), Cluster(wait_s=29.0).choose, 0.0), Wait)
    assert isinstance(gate.offer(request("d", BATCH), Cluster(wait_s=31.0).choose, 0.0), Refuse)


def test_a_refusal_to_route_at_all_stays_what_it_is() -> None:
    def nobody(_asked: RouteRequest) -> Choice:
        raise ModelNotFound("no such model")

    refused = admission().offer(request("a"), nobody, 0.0)
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, ModelNotFound)


def test_those_in_line_go_when_there_is_room_and_a_newcomer_does_not_pass_them() -> None:
    gate, cluster = admission(), Cluster()
    for name in ("a", "b"):
        assert isinstance(gate.offer(request(name), cluster.choose, 0.0), Wait)
    assert released(gate, cluster, 0.1) == []
    cluster.room = 1
    later = gate.offer(request("c"), cluster.choose, 0.2)
    assert later == Wait(2, pytest.approx(later.wait_s))  # type: ignore[union-attr]
    assert released(gate, cluster, 0.2) == [("a", Go)]
    cluster.room = 5
    assert released(gate, cluster, 0.3) == [("b", Go), ("c", Go)]
    assert len(gate) == 0


def test_a_more_urgent_class_passes_the_line() -> None:
    gate, cluster = admission(), Cluster()
    assert isinstance(gate.offer(request("a", BATCH), cluster.choose, 0.0), Wait)
    cluster.room = 1
    assert isinstance(gate.offer(request("b"), cluster.choose, 0.1), Go)


def test_waiting_ends_with_a_refusal_when_the_first_token_would_be_too_late() -> None:
    gate, cluster = admission(), Cluster()
    gate.offer(request("a"), cluster.choose, 0.0)
    assert released(gate, cluster, 1.29) == []
    cluster.room = 1
    assert released(gate, cluster, 1.31) == [("a", Refuse)]  # 0.69 s are left, and 0.5 are none to rely on any more
    cluster.room = 0
    gate.offer(request("b", BATCH), cluster.choose, 2.0)
    assert released(gate, cluster, 31.9) == []
    assert released(gate, cluster, 32.0) == [("b", Refuse)]


def test_whoever_asks_again_keeps_its_place_here_and_elsewhere() -> None:
    gate, cluster = admission(), Cluster()
    for name in ("a", "b"):
        gate.offer(request(name, BATCH), cluster.choose, 0.0)
    assert gate.away(RequestId("a")) == Wait(0, pytest.approx(0.5))
    again = request("a", BATCH, waited_s=1.0)
    assert gate.offer(again, cluster.choose, 1.0) == Wait(0, pytest.approx(0.5))
    other = admission()
    other.offer(request("x", BATCH), cluster.choose, 0.5)
    assert other.offer(again, cluster.choose, 1.0) == Wait(0, pytest.approx(0.5))


def test_one_that_is_told_to_ask_again_does_not_go_meanwhile_and_lapses_if_it_never_does() -> None:
    gate, cluster = admission(), Cluster()
    for name in ("a", "b"):
        gate.offer(request(name, BATCH), cluster.choose, 0.0)
    gate.away(RequestId("a"))
    cluster.room = 2
    assert released(gate, cluster, 0.5) == [("b", Go)]
    assert len(gate) == 1
    assert released(gate, cluster, 1.0 + GRACE_S + 0.1) == []
    assert len(gate) == 0


def test_a_request_that_has_begun_is_never_held_or_refused() -> None:
    gate, cluster = admission(), Cluster(ttft_s=50.0)
    begun = request("a", exclude=(Incarnation("dead"),))
    assert isinstance(gate.offer(begun, cluster.choose, 0.0), Go)


def test_the_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus_planner.admission.control.MAX_LINE", 2)
    gate, cluster = admission(), Cluster()
    kinds = [type(gate.offer(request(str(number), BATCH), cluster.choose, 0.0)) for number in range(3)]
    assert kinds == [Wait, Wait, Refuse]


def test_a_prediction_that_fails_while_in_line_is_the_requests_own_end() -> None:
    gate, cluster = admission(), Cluster()
    gate.offer(request("a", BATCH), cluster.choose, 0.0)

    def gone(_asked: RouteRequest) -> Choice:
        raise IsthmusError("all workers are gone")

    assert [type(decision) for _, decision in gate.release(gone, 1.0)] == [Refuse]
