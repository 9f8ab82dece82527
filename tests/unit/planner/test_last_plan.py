"""What ingresses are given for the time without a planner."""

from __future__ import annotations

from isthmus_planner.last_plan import MAX_PAIRS, route_plan
from isthmus_planner.registry import Registry
from isthmus_planner.routing.policy import ModePolicy, Policy
from isthmus_shared.ids import Incarnation, NodeId, WorkerId
from isthmus_shared.messages.health import PlannerHeartbeat, ProcessState, Role, WorkerHeartbeat, WorkerLoad
from isthmus_shared.messages.route import PlannedPair, RoutePlan
from isthmus_shared.messages.work import RelayRef

ME = Incarnation("planner-life")


def worker(
    name: str,
    role: Role,
    *,
    model: str = "demo",
    fingerprint: str = "f",
    state: ProcessState = ProcessState.READY,
    step_s: float | None = None,
    running: int = 0,
    epoch: int = 0,
) -> WorkerHeartbeat:
    node = NodeId(f"node-{name}")
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
        kv_form="fp32",
        kv_layout="x",
        max_model_len_tokens=4096,
        kv_block_tokens=16,
        relay=RelayRef(node_id=node, incarnation=Incarnation("r"), address="127.0.0.1:1"),
        load=WorkerLoad(kv_blocks_total=10, kv_blocks_free=10, decode_step_s=step_s, running=running),
        epoch=epoch,
    )


def planned(*workers: WorkerHeartbeat, policy: Policy | None = None) -> RoutePlan:
    return route_plan(workers, {}, policy or Policy(), planner=ME, valid_s=30)


def pairs(plan: RoutePlan) -> tuple[PlannedPair, ...]:
    return plan.models[0].pairs


def names(plan: RoutePlan) -> set[tuple[str | None, str]]:
    return {(None if p.prefill is None else p.prefill.worker_id, p.decode.worker_id) for p in pairs(plan)}


def test_it_names_every_pair_that_can_exchange_kv() -> None:
    plan = planned(
        worker("p1", Role.PREFILL),
        worker("p2", Role.PREFILL, fingerprint="another"),
        worker("d1", Role.DECODE),
        worker("d2", Role.DECODE),
        worker("d3", Role.DECODE, state=ProcessState.DRAINING),
    )
    assert names(plan) == {("p1", "d1"), ("p1", "d2")}


def test_where_no_pair_is_the_decode_workers_serve_alone() -> None:
    assert names(planned(worker("d1", Role.DECODE))) == {(None, "d1")}
    aggregated = Policy(mode=ModePolicy.AGGREGATED)
    assert names(planned(worker("p1", Role.PREFILL), worker("d1", Role.DECODE), policy=aggregated)) == {(None, "d1")}


def test_a_faster_worker_gets_more_and_the_load_of_the_moment_does_not_count() -> None:
    fast, slow = worker("d1", Role.DECODE, step_s=0.01, running=50), worker("d2", Role.DECODE, step_s=0.02)
    first, second = pairs(planned(worker("p1", Role.PREFILL), fast, slow))
    assert first.decode.worker_id == "d1"
    assert 1.5 < first.weight / second.weight < 2.1


def test_each_model_has_its_own_and_one_without_workers_has_none() -> None:
    plan = planned(worker("d1", Role.DECODE), worker("p2", Role.PREFILL, model="other"))
    assert [model.model for model in plan.models] == ["demo"]


def test_a_large_cluster_is_told_in_bounded_pairs_that_leave_no_decode_worker_out() -> None:
    workers = [worker(f"p{n}", Role.PREFILL) for n in range(40)] + [worker(f"d{n}", Role.DECODE) for n in range(50)]
    plan = planned(*workers)
    assert len(pairs(plan)) == MAX_PAIRS
    assert {pair.decode.worker_id for pair in pairs(plan)} == {f"d{n}" for n in range(50)}
    assert len({pair.prefill.worker_id for pair in pairs(plan) if pair.prefill is not None}) == 40


def test_the_highest_epoch_is_remembered_after_its_leader_is_gone() -> None:
    registry = Registry()
    beat = PlannerHeartbeat(incarnation=ME, state=ProcessState.READY, interval_s=0.5, leader=True, epoch=7)
    registry.planner_beat(beat, 0.0)
    registry.sweep(100.0)
    assert (registry.planners, registry.highest_epoch) == ((), 7)
    registry.worker_beat(worker("d1", Role.DECODE, epoch=9), 100.0)
    assert registry.highest_epoch == 9
