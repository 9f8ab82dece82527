"""Routes as a whole: what is chosen, and why nothing is."""

from __future__ import annotations

from collections import Counter

import pytest

from isthmus_planner.routing.choose import choose
from isthmus_planner.routing.policy import ModePolicy, Policy
from isthmus_planner.routing.types import Choice
from isthmus_planner.routing.view import View
from isthmus_shared.errors import ContextTooLong, IsthmusError, ModelNotFound, Unavailable
from isthmus_shared.messages.health import ProcessState, Role, WorkerHeartbeat
from isthmus_shared.messages.route import Mode, RouteRequest, StagedKv
from isthmus_testing.clusters import PLANNER, ask, known, life, relay, relay_ref, view_of, worker


def route(
    request: RouteRequest,
    workers: tuple[WorkerHeartbeat, ...],
    mode: ModePolicy = ModePolicy.DISAGGREGATED,
    *,
    models: tuple[str, ...] = ("demo",),
    warm: bool = True,
) -> Choice:
    view = view_of(workers, Policy(mode=mode))
    return choose(request, view, lambda: known(*models, warm=warm), PLANNER, 0.0)


def sides(chosen: Choice) -> tuple[str | None, str]:
    return (None if chosen.prefill is None else chosen.prefill.ref.worker_id), chosen.decode.ref.worker_id


P, D = worker("p", Role.PREFILL), worker("d", Role.DECODE)


def test_a_feasible_pair_is_disaggregated_and_names_both_lives() -> None:
    chosen = route(ask(), (P, D)).route
    assert chosen.mode is Mode.DISAGGREGATED
    assert chosen.prefill is not None
    assert (chosen.prefill.incarnation, chosen.decode.incarnation) == ("life-p", "life-d")
    assert chosen.planner == PLANNER
    assert chosen.deadlines.transfer_s > chosen.deadlines.ttft_s


@pytest.mark.parametrize(
    "prefill",
    [
        worker("p", Role.PREFILL, relay=False),
        worker("p", Role.PREFILL, fingerprint="g"),
        worker("p", Role.PREFILL, form="bf16"),
        worker("p", Role.PREFILL, state=ProcessState.DRAINING),
        worker("p", Role.PREFILL, max_len=100),
        worker("p", Role.PREFILL, blocks=6),
    ],
    ids=["no relay", "other weights", "other KV form", "draining", "short context", "small cache"],
)
def test_without_a_feasible_pair_the_decode_worker_serves_alone(prefill: WorkerHeartbeat) -> None:
    chosen = route(ask(100), (prefill, D))
    assert (chosen.mode, sides(chosen)) == (Mode.AGGREGATED, (None, "d"))


def test_a_life_that_has_just_failed_the_request_is_left_out() -> None:
    other = worker("q", Role.PREFILL, queued=100_000)
    assert sides(route(ask(), (P, other, D))) == ("p", "d")
    assert sides(route(ask(exclude=("p",)), (P, other, D))) == ("q", "d")


def test_when_nobody_else_is_left_a_decode_worker_that_failed_in_a_pair_serves_alone() -> None:
    assert sides(route(ask(exclude=("p", "d")), (P, D))) == (None, "d")
    spare = worker("e", Role.DECODE, queued=100_000)
    assert sides(route(ask(exclude=("p", "d")), (P, D, spare))) == (None, "e"), "one without blame goes first"


def test_the_least_predicted_ttft_wins_by_queue_and_by_measured_speed() -> None:
    busy = worker("p1", Role.PREFILL, queued=5000)
    idle = worker("p2", Role.PREFILL)
    assert sides(route(ask(), (busy, idle, D))) == ("p2", "d")
    fast = worker("p1", Role.PREFILL, queued=5000, prefill_rate=1e6)
    assert sides(route(ask(), (fast, idle, D))) == ("p1", "d")


def test_of_equal_decode_workers_the_one_with_room_and_the_faster_step_wins() -> None:
    full = worker("d1", Role.DECODE, free=2)
    roomy = worker("d2", Role.DECODE)
    assert sides(route(ask(), (P, full, roomy)))[1] == "d2"
    slow = worker("d1", Role.DECODE, step_s=0.2)
    quick = worker("d2", Role.DECODE, step_s=0.01)
    assert sides(route(ask(), (P, slow, quick)))[1] == "d2"


def test_a_burst_between_two_beats_is_spread() -> None:
    prefillers = [worker(name, Role.PREFILL) for name in ("p1", "p2")]
    decoders = [worker(name, Role.DECODE) for name in ("d1", "d2")]
    view = view_of([*prefillers, *decoders])
    counts: Counter[str | None] = Counter()
    for index in range(20):
        chosen = choose(ask(name=f"r{index}"), view, known, PLANNER, 0.0)
        view.commit(chosen, 0.0)
        counts.update(sides(chosen))
    assert counts == {"p1": 10, "p2": 10, "d1": 10, "d2": 10}


def test_the_mode_policy_is_obeyed() -> None:
    assert route(ask(), (P, D), ModePolicy.AGGREGATED).mode is Mode.AGGREGATED
    slow_prefill = worker("p", Role.PREFILL, prefill_rate=10.0, step_s=0.01)
    fast_decode = worker("d", Role.DECODE, prefill_rate=1e5, step_s=0.01)
    assert route(ask(), (slow_prefill, fast_decode)).mode is Mode.DISAGGREGATED
    assert route(ask(), (slow_prefill, fast_decode), ModePolicy.AUTO).mode is Mode.AGGREGATED
    busy_decode = worker("d", Role.DECODE, prefill_rate=1e3, step_s=0.01, running=30)
    fast_prefill = worker("p", Role.PREFILL, prefill_rate=1e5)
    assert route(ask(), (fast_prefill, busy_decode), ModePolicy.AUTO).mode is Mode.DISAGGREGATED


def test_a_prediction_says_whether_it_was_measured() -> None:
    guess = route(ask(), (P, D)).predicted
    measured = route(
        ask(), (worker("p", Role.PREFILL, prefill_rate=1000.0), worker("d", Role.DECODE, step_s=0.01))
    ).predicted
    assert not guess.calibrated
    assert measured.calibrated
    assert measured.ttft_p50_s == pytest.approx(0.1)
    assert measured.ttft_p90_s > measured.ttft_p50_s


def _refusal(
    request: RouteRequest,
    workers: tuple[WorkerHeartbeat, ...],
    *,
    models: tuple[str, ...] = ("demo",),
    warm: bool = True,
) -> IsthmusError:
    with pytest.raises(IsthmusError) as caught:
        route(request, workers, models=models, warm=warm)
    return caught.value


def test_an_unknown_model_is_not_found_unless_the_planner_is_too_young_to_know() -> None:
    error = _refusal(ask(model="gpt"), (P, D))
    assert isinstance(error, ModelNotFound)
    assert "demo" in error.text
    young = _refusal(ask(), (), models=(), warm=False)
    assert type(young) is Unavailable
    assert young.retry_after_s


def test_a_known_model_without_workers_is_unavailable_not_unknown() -> None:
    error = _refusal(ask(), ())
    assert type(error) is Unavailable
    assert error.retry_after_s


def test_a_prompt_longer_than_any_context_is_the_callers_fault() -> None:
    error = _refusal(ask(8192), (P, D))
    assert isinstance(error, ContextTooLong)
    assert error.param == "prompt"


def test_a_refusal_says_which_filter_removed_whom() -> None:
    error = _refusal(ask(exclude=("p",)), (P,))
    assert type(error) is Unavailable
    assert "1 x has just failed this request" in error.why
    error = _refusal(ask(), (P,))
    assert type(error) is Unavailable
    assert "1 x has no decode role" in error.why
    assert error.retry_after_s
    starting = worker("d", Role.DECODE, state=ProcessState.STARTING)
    error = _refusal(ask(), (starting,))
    assert type(error) is Unavailable
    assert "1 x is starting" in error.why


def resumed(
    *workers: WorkerHeartbeat,
    mode: ModePolicy = ModePolicy.DISAGGREGATED,
    relay_life: str = "relay-n",
    fingerprint: str = "f",
    form: str = "fp32",
) -> tuple[Choice, View]:
    view = view_of(workers, Policy(mode=mode))
    view.relay(relay("n"), 0.0)
    source = relay_ref("n").model_copy(update={"incarnation": relay_life})
    kv = StagedKv(relay=source, tokens=900, model_fingerprint=fingerprint, kv_form=form)
    request = ask(1000, exclude=("x",)).model_copy(update={"staged": kv})
    return choose(request, view, known, PLANNER, 0.0), view


@pytest.mark.parametrize("mode", ModePolicy)
def test_staged_kv_is_fetched_by_a_decode_worker_and_nobody_prefills(mode: ModePolicy) -> None:
    chosen, view = resumed(P, D, mode=mode)
    assert (chosen.mode, chosen.prefill, chosen.decode.ref.worker_id) == (Mode.DISAGGREGATED, None, "d")
    view.commit(chosen, 0.0)
    assert view.ledger.pending(life("d")).prefill_tokens == 100, "only what follows the staged KV is computed"


@pytest.mark.parametrize("facts", [{"relay_life": "dead"}, {"fingerprint": "other"}, {"form": "bf16"}])
def test_staged_kv_that_nobody_can_fetch_is_prefilled_again(facts: dict[str, str]) -> None:
    chosen, _ = resumed(P, D, **facts)
    assert (chosen.mode, chosen.prefill is None) == (Mode.DISAGGREGATED, False)


def test_a_decode_worker_without_a_relay_fetches_no_staged_kv() -> None:
    chosen, _ = resumed(worker("d", Role.DECODE, relay=False))
    assert chosen.mode is Mode.AGGREGATED


@pytest.mark.parametrize("mode", [ModePolicy.DISAGGREGATED, ModePolicy.AGGREGATED])
def test_room_is_needed_for_the_first_token_too(mode: ModePolicy) -> None:
    exact = worker("d1", Role.DECODE, free=6, step_s=0.010)
    roomy = worker("d2", Role.DECODE, free=7, step_s=0.011)
    assert route(ask(96), (P, exact, roomy), mode).decode.ref.worker_id == "d2"
    assert route(ask(95), (P, exact, roomy), mode).decode.ref.worker_id == "d1"


BOTH = (Role.PREFILL, Role.DECODE)


def test_a_worker_in_both_roles_serves_alone_where_that_costs_least_and_never_pairs_with_itself() -> None:
    both = worker("b", *BOTH, prefill_rate=1e5, step_s=0.01)
    assert sides(route(ask(), (both,))) == (None, "b")
    assert sides(route(ask(), (both, worker("d", Role.DECODE, step_s=0.05)), ModePolicy.AUTO)) == (None, "b")
    crowded = worker("b", *BOTH, prefill_rate=1e4, step_s=0.01, running=40)
    idle = worker("d", Role.DECODE, step_s=0.01)
    assert sides(route(ask(8000), (worker("p", Role.PREFILL, prefill_rate=1e4), crowded, idle), ModePolicy.AUTO)) == (
        "p",
        "d",
    ), "forty streams would stand still for its prefill"


def test_a_prompt_as_long_as_a_workers_context_is_left_out_for_that_reason() -> None:
    short, long = worker("d1", Role.DECODE, max_len=100), worker("d2", Role.PREFILL, max_len=200)
    error = _refusal(ask(100), (short, long))
    assert "1 x has a context of 100 tokens" in error.why


def test_without_room_the_wait_is_until_somebody_there_may_end() -> None:
    def wait_s(running: int) -> float:
        full = worker("d", Role.DECODE, free=0, running=running, step_s=0.01)
        chosen = route(ask(100, osl=200), (P, full))
        assert not chosen.feasible
        return chosen.predicted_wait_s

    assert 0.2 < wait_s(1) < 2.0
    assert wait_s(9) == pytest.approx(wait_s(1) / 5, rel=0.5), "of many the first ends soon"
