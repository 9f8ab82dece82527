from __future__ import annotations

from collections.abc import Callable

import pytest

from isthmus_planner.cost.speeds import Pending
from isthmus_planner.ledger import Ledger
from isthmus_planner.route import Cluster, ModePolicy, Plan, Policy, assignments, choose
from isthmus_shared.errors import ContextTooLong, IsthmusError, ModelNotFound, Unavailable
from isthmus_shared.ids import Incarnation, NodeId, RequestId, WorkerId
from isthmus_shared.messages.health import ProcessState, Role, WorkerHeartbeat, WorkerLoad
from isthmus_shared.messages.route import Mode, Route, RouteRequest, StagedKv
from isthmus_shared.messages.work import RelayRef

PLANNER = Incarnation("planner-life")


def worker(
    name: str,
    role: Role,
    *,
    relay: bool = True,
    state: ProcessState = ProcessState.READY,
    fingerprint: str = "f",
    form: str = "fp32",
    model: str = "demo",
    max_len: int = 8192,
    blocks: int = 1000,
    free: int | None = None,
    queued: int = 0,
    running: int = 0,
    prefill_rate: float | None = None,
    step_s: float | None = None,
) -> WorkerHeartbeat:
    node = NodeId(f"node-{name}")
    address = RelayRef(node_id=node, incarnation=Incarnation("r"), address="127.0.0.1:1")
    return WorkerHeartbeat(
        incarnation=Incarnation(f"life-{name}"),
        state=state,
        interval_s=0.5,
        worker_id=WorkerId(name),
        node_id=node,
        roles=(role,),
        vendor="cpu",
        engine="sim",
        model=model,
        model_fingerprint=fingerprint,
        kv_form=form,
        kv_layout="x",
        max_model_len_tokens=max_len,
        kv_block_tokens=16,
        relay=address if relay else None,
        load=WorkerLoad(
            running=running,
            queued_prefill_tokens=queued,
            kv_blocks_total=blocks,
            kv_blocks_free=blocks if free is None else free,
            prefill_tokens_per_s=prefill_rate,
            decode_step_s=step_s,
        ),
    )


def cluster(*workers: WorkerHeartbeat, warm: bool = True, models: tuple[str, ...] = ()) -> Cluster:
    return Cluster(workers, {}, frozenset(models) | {w.model for w in workers}, warm)


def ask(isl: int = 100, *, model: str = "demo", exclude: tuple[str, ...] = ()) -> RouteRequest:
    lives = tuple(Incarnation(f"life-{name}") for name in exclude)
    return RouteRequest(request_id=RequestId("r"), model=model, isl_tokens=isl, max_osl_tokens=16, exclude=lives)


def route(request: RouteRequest, known: Cluster, mode: ModePolicy = ModePolicy.DISAGGREGATED) -> Route:
    return choose(request, known, Policy(mode=mode), PLANNER)[0]


def sides(chosen: Route) -> tuple[str | None, str]:
    return (None if chosen.prefill is None else chosen.prefill.worker_id), chosen.decode.worker_id


P, D = worker("p", Role.PREFILL), worker("d", Role.DECODE)


def test_a_feasible_pair_is_disaggregated_and_names_both_lives() -> None:
    chosen = route(ask(), cluster(P, D))
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
    chosen = route(ask(100), cluster(prefill, D))
    assert (chosen.mode, sides(chosen)) == (Mode.AGGREGATED, (None, "d"))


def test_a_life_that_has_just_failed_the_request_is_left_out() -> None:
    other = worker("q", Role.PREFILL, queued=100_000)
    assert sides(route(ask(), cluster(P, other, D))) == ("p", "d")
    assert sides(route(ask(exclude=("p",)), cluster(P, other, D))) == ("q", "d")


def test_when_nobody_else_is_left_a_decode_worker_that_failed_in_a_pair_serves_alone() -> None:
    assert sides(route(ask(exclude=("p", "d")), cluster(P, D))) == (None, "d")
    spare = worker("e", Role.DECODE, queued=100_000)
    assert sides(route(ask(exclude=("p", "d")), cluster(P, D, spare))) == (None, "e"), "one without blame goes first"


def test_the_least_predicted_ttft_wins_by_queue_and_by_measured_speed() -> None:
    busy = worker("p1", Role.PREFILL, queued=5000)
    idle = worker("p2", Role.PREFILL)
    assert sides(route(ask(), cluster(busy, idle, D))) == ("p2", "d")
    fast = worker("p1", Role.PREFILL, queued=5000, prefill_rate=1e6)
    assert sides(route(ask(), cluster(fast, idle, D))) == ("p1", "d")


def test_of_equal_decode_workers_the_one_with_room_and_the_faster_step_wins() -> None:
    full = worker("d1", Role.DECODE, free=2)
    roomy = worker("d2", Role.DECODE)
    assert sides(route(ask(), cluster(P, full, roomy)))[1] == "d2"
    slow = worker("d1", Role.DECODE, step_s=0.2)
    quick = worker("d2", Role.DECODE, step_s=0.01)
    assert sides(route(ask(), cluster(P, slow, quick)))[1] == "d2"


def test_a_burst_between_two_beats_is_spread() -> None:
    known = (
        worker("p1", Role.PREFILL),
        worker("p2", Role.PREFILL),
        worker("d1", Role.DECODE),
        worker("d2", Role.DECODE),
    )
    ledger = Ledger()
    counts: dict[str, int] = {}
    for _ in range(20):
        now = Cluster(known, ledger.pending(0.0), frozenset({"demo"}), warm=True)
        chosen, plan = choose(ask(), now, Policy(), PLANNER)
        for incarnation, work in assignments(ask(), plan):
            ledger.add(incarnation, work, 0.0)
        for name in sides(chosen):
            counts[str(name)] = counts.get(str(name), 0) + 1
    assert counts == {"p1": 10, "p2": 10, "d1": 10, "d2": 10}


def test_a_beat_covers_what_was_routed_well_before_it_and_not_what_is_on_its_way() -> None:
    ledger = Ledger()
    life = Incarnation("a")
    ledger.add(life, Pending(prefill_tokens=10, sequences=1), 0.0)
    ledger.add(life, Pending(prefill_tokens=7, sequences=1), 0.95)
    ledger.beat(life, 1.0)
    assert ledger.pending(1.0) == {life: Pending(prefill_tokens=7, sequences=1)}
    ledger.forget(life, 1.0)
    assert ledger.pending(1.0) == {}


def test_the_mode_policy_is_obeyed() -> None:
    assert route(ask(), cluster(P, D), ModePolicy.AGGREGATED).mode is Mode.AGGREGATED
    slow_prefill = worker("p", Role.PREFILL, prefill_rate=10.0, step_s=0.01)
    fast_decode = worker("d", Role.DECODE, prefill_rate=1e5, step_s=0.01)
    assert route(ask(), cluster(slow_prefill, fast_decode)).mode is Mode.DISAGGREGATED
    assert route(ask(), cluster(slow_prefill, fast_decode), ModePolicy.AUTO).mode is Mode.AGGREGATED
    busy_decode = worker("d", Role.DECODE, prefill_rate=1e3, step_s=0.01, running=30)
    fast_prefill = worker("p", Role.PREFILL, prefill_rate=1e5)
    assert route(ask(), cluster(fast_prefill, busy_decode), ModePolicy.AUTO).mode is Mode.DISAGGREGATED


def test_a_prediction_says_whether_it_was_measured() -> None:
    guess = route(ask(), cluster(P, D)).predicted
    measured = route(
        ask(), cluster(worker("p", Role.PREFILL, prefill_rate=1000.0), worker("d", Role.DECODE, step_s=0.01))
    ).predicted
    assert not guess.calibrated
    assert measured.calibrated
    assert measured.ttft_p50_s == pytest.approx(0.1)
    assert measured.ttft_p90_s > measured.ttft_p50_s


def _refusal(call: Callable[[], Route | tuple[Route, Plan]]) -> IsthmusError:
    with pytest.raises(IsthmusError) as caught:
        call()
    return caught.value


def test_an_unknown_model_is_not_found_unless_the_planner_is_too_young_to_know() -> None:
    error = _refusal(lambda: route(ask(model="gpt"), cluster(P, D)))
    assert isinstance(error, ModelNotFound)
    assert "demo" in error.text
    young = _refusal(lambda: route(ask(), cluster(warm=False)))
    assert type(young) is Unavailable
    assert young.retry_after_s


def test_a_known_model_without_workers_is_unavailable_not_unknown() -> None:
    error = _refusal(lambda: route(ask(), cluster(models=("demo",))))
    assert type(error) is Unavailable
    assert error.retry_after_s


def test_a_prompt_longer_than_any_context_is_the_callers_fault() -> None:
    error = _refusal(lambda: route(ask(8192), cluster(P, D)))
    assert isinstance(error, ContextTooLong)
    assert error.param == "prompt"


def test_a_refusal_says_which_filter_removed_whom() -> None:
    error = _refusal(lambda: route(ask(exclude=("p",)), cluster(P)))
    assert type(error) is Unavailable
    assert "1 x has just failed this request" in error.why
    error = _refusal(lambda: route(ask(), cluster(P)))
    assert type(error) is Unavailable
    assert "1 x has no decode role" in error.why
    assert error.retry_after_s
    starting = worker("d", Role.DECODE, state=ProcessState.STARTING)
    error = _refusal(lambda: route(ask(), cluster(starting)))
    assert type(error) is Unavailable
    assert "1 x is starting" in error.why


def staged(tokens: int = 900, **facts: str) -> StagedKv:
    relay = RelayRef(node_id=NodeId("node-p"), incarnation=Incarnation(facts.get("relay", "r")), address="127.0.0.1:1")
    fingerprint, form = facts.get("fingerprint", "f"), facts.get("form", "fp32")
    return StagedKv(relay=relay, tokens=tokens, model_fingerprint=fingerprint, kv_form=form)


def resumed(*workers: WorkerHeartbeat, kv: StagedKv, policy: Policy = Policy()) -> tuple[Route, Plan]:  # noqa: B008
    request = RouteRequest(
        request_id=RequestId("r"),
        model="demo",
        isl_tokens=1000,
        max_osl_tokens=10,
        staged=kv,
        exclude=(Incarnation("x"),),
    )
    cluster = Cluster(workers, {}, frozenset({"demo"}), warm=True, relays=frozenset({Incarnation("r")}))
    return choose(request, cluster, policy, PLANNER)


@pytest.mark.parametrize("mode", ModePolicy)
def test_staged_kv_is_fetched_by_a_decode_worker_and_nobody_prefills(mode: ModePolicy) -> None:
    route, plan = resumed(worker("p", Role.PREFILL), worker("d", Role.DECODE), kv=staged(), policy=Policy(mode=mode))
    assert (route.mode, route.prefill, route.decode.worker_id) == (Mode.DISAGGREGATED, None, "d")
    request = RouteRequest(request_id=RequestId("r"), model="demo", isl_tokens=1000, max_osl_tokens=1, staged=staged())
    ((life, pending),) = assignments(request, plan)
    assert (life, pending.prefill_tokens) == ("life-d", 100), "only what follows the staged KV is computed"


@pytest.mark.parametrize("facts", [{"relay": "dead"}, {"fingerprint": "other"}, {"form": "bf16"}])
def test_staged_kv_that_nobody_can_fetch_is_prefilled_again(facts: dict[str, str]) -> None:
    route, _ = resumed(worker("p", Role.PREFILL), worker("d", Role.DECODE), kv=staged(**facts))
    assert (route.mode, route.prefill is None) == (Mode.DISAGGREGATED, False)


def test_a_decode_worker_without_a_relay_fetches_no_staged_kv() -> None:
    route, _ = resumed(worker("d", Role.DECODE, relay=False), kv=staged())
    assert route.mode is Mode.AGGREGATED
