"""Predicted beside actual, and what is learned from it."""

from __future__ import annotations

import random

import pytest

from isthmus_planner.outcomes import RECENT, Accuracy
from isthmus_shared.ids import Incarnation, NodeId, RequestId, WorkerId
from isthmus_shared.messages.outcomes import Outcome
from isthmus_shared.messages.route import Mode, Prediction
from isthmus_shared.messages.work import WorkerRef

P, D = Incarnation("p"), Incarnation("d")


def ref(life: Incarnation) -> WorkerRef:
    return WorkerRef(worker_id=WorkerId(life), incarnation=life, node_id=NodeId("n"))


def end(
    accuracy: Accuracy,
    number: int,
    *,
    ttft_s: float,
    raw_ttft_s: float = 0.1,
    itl_s: float | None = 0.02,
    raw_itl_s: float = 0.02,
    tells_base: bool = True,
    tells_factor: bool = True,
    **others: object,
) -> None:
    request = RequestId(f"r{number}")
    (base_s, _), (_, factor) = accuracy.correction(P), accuracy.correction(D)
    accuracy.made(request, P, D, tells_base=tells_base, tells_factor=tells_factor)
    told = Prediction(
        ttft_p50_s=raw_ttft_s + base_s, ttft_p90_s=1, itl_p50_s=raw_itl_s * factor, itl_p90_s=1, calibrated=True
    )
    outcome = Outcome(
        request_id=request,
        model="m",
        mode=Mode.DISAGGREGATED,
        prefill=ref(P),
        decode=ref(D),
        isl_tokens=1,
        osl_tokens=10,
        ttft_s=ttft_s,
        itl_s=itl_s,
        e2el_s=1.0,
        predicted=told,
    )
    accuracy.take(outcome.model_copy(update=others))


def test_a_front_end_that_no_step_shows_is_added_to_later_predictions() -> None:
    accuracy, rng = Accuracy(), random.Random(1)
    for number in range(100):
        # 30 ms on top; one in four waits for somebody else as well.
        late_s = rng.choice((0.0, 0.0, 0.0, 0.3))
        end(accuracy, number, ttft_s=0.13 + late_s + rng.uniform(-0.003, 0.003))
    base_s, _ = accuracy.correction(P)
    assert base_s == pytest.approx(0.03, abs=0.006)


def test_what_waited_mostly_for_others_teaches_nothing_of_the_worker() -> None:
    accuracy = Accuracy()
    for number in range(100):
        end(accuracy, number, ttft_s=1.0, itl_s=0.1, tells_base=False, tells_factor=False)
    assert accuracy.correction(P)[0] == 0.0
    assert accuracy.correction(D)[1] == 1.0


@pytest.mark.parametrize("ratio", [0.85, 1.3])
def test_a_latency_between_tokens_that_is_always_off_is_corrected_by_its_factor(ratio: float) -> None:
    accuracy, rng = Accuracy(), random.Random(2)
    for number in range(200):
        end(accuracy, number, ttft_s=0.1, itl_s=0.02 * ratio * rng.uniform(0.97, 1.03))
    assert accuracy.correction(D)[1] == pytest.approx(ratio, rel=0.05)


def test_medians_are_told_of_the_latest_requests_without_their_time_in_line() -> None:
    accuracy = Accuracy()
    for number in range(RECENT + 50):
        end(accuracy, number, ttft_s=2.1 if number < 50 else 2.2, queued_s=2.0, tells_base=False)
    ttft, itl = accuracy.of_worker(P)
    assert ttft is not None
    assert (ttft.requests, ttft.actual_p50_s) == (RECENT, pytest.approx(0.2))
    assert ttft.predicted_p50_s == pytest.approx(0.1)
    assert ttft.error == pytest.approx(0.5)
    assert itl is None
    model_ttft, model_itl = accuracy.of_model("m")
    assert model_ttft == ttft
    assert model_itl is not None


def test_a_request_that_was_routed_twice_or_never_tells_nothing() -> None:
    accuracy = Accuracy()
    end(accuracy, 1, ttft_s=1.0, attempts=2)
    end(accuracy, 2, ttft_s=1.0, predicted=None)
    assert len(accuracy) == 0
    assert accuracy.models == ()


def test_a_life_that_ends_takes_what_was_learned_of_it_along() -> None:
    accuracy = Accuracy()
    end(accuracy, 1, ttft_s=1.0)
    assert len(accuracy) == 2
    accuracy.keep([D])
    assert len(accuracy) == 1
    assert accuracy.of_worker(P) == (None, None)
    assert accuracy.correction(P) == (0.0, 1.0)
