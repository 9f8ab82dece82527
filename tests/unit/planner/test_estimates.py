from __future__ import annotations

import dataclasses

import pytest

from isthmus_planner.cost.online import StepCosts
from isthmus_planner.cost.speeds import CostConstants, Pending, Side, predict, prior_costs, queue_wait_s
from isthmus_planner.estimates import Estimates
from isthmus_planner.routing.choose import choose
from isthmus_planner.routing.policy import Policy
from isthmus_planner.routing.refusing import Known
from isthmus_planner.routing.view import View
from isthmus_shared.ids import Incarnation, NodeId, RequestId, WorkerId
from isthmus_shared.messages.health import ProcessState, Role, StepSample, WorkerHeartbeat, WorkerLoad
from isthmus_shared.messages.route import RouteRequest
from isthmus_shared.messages.work import RelayRef

DEFAULTS = CostConstants()
TRUTH = StepCosts(base_s=4e-3, per_sequence_s=100e-6, per_kv_token_s=50e-9, per_prefill_token_s=10e-6)


def beat(
    name: str,
    *samples: StepSample,
    total: int,
    role: Role = Role.DECODE,
    running: int = 4,
    queued: int = 0,
    used_blocks: int = 100,
) -> WorkerHeartbeat:
    node = NodeId(f"node-{name}")
    return WorkerHeartbeat(
        incarnation=Incarnation(f"life-{name}"),
        state=ProcessState.READY,
        interval_s=0.5,
        worker_id=WorkerId(name),
        node_id=node,
        roles=(role,),
        vendor="cpu",
        engine="sim",
        model="demo",
        model_fingerprint="f",
        kv_form="fp32",
        kv_layout="x",
        max_model_len_tokens=8192,
        kv_block_tokens=16,
        relay=RelayRef(node_id=node, incarnation=Incarnation("r"), address="127.0.0.1:1"),
        load=WorkerLoad(
            running=running,
            queued_prefill_tokens=queued,
            kv_blocks_total=1000,
            kv_blocks_free=1000 - used_blocks,
            steps_total=total,
            steps=samples,
        ),
    )


def sample(index: int, truth: StepCosts = TRUTH) -> StepSample:
    batch, prompt = 1 + index % 13, (0, 0, 256, 128)[index % 4]
    kv = batch * (300 + 170 * (index % 7))
    took = truth.step_s(batch, kv, prompt)
    return StepSample(step_s=took, decode_sequences=batch, prefill_tokens=prompt, kv_tokens=kv)


def taught(estimates: Estimates, name: str, truth: StepCosts = TRUTH, role: Role = Role.DECODE) -> None:
    for first in range(0, 200, 8):
        estimates.beat(beat(name, *(sample(i, truth) for i in range(first, first + 8)), total=first + 8, role=role))


def side(estimates: Estimates, heard: WorkerHeartbeat, pending: Pending | None = None) -> Side:
    return Side(heard, pending or Pending(), estimates.live().get(heard.incarnation))


def test_predictions_come_from_the_steps_that_a_worker_tells() -> None:
    estimates = Estimates(prior_costs(DEFAULTS))
    taught(estimates, "w")
    now = beat("w", total=200, running=7, queued=1000, used_blocks=200)
    at = side(estimates, now, Pending(prefill_tokens=24, sequences=2, kv_blocks=50))
    found = predict(at, at, 512, DEFAULTS)
    kv = 250 * 16
    assert found.itl_p50_s == pytest.approx(TRUTH.step_s(7 + 2 + 1, kv + 512), rel=0.02)
    longer = predict(at, at, 8000, DEFAULTS)
    assert longer.itl_p50_s - found.itl_p50_s == pytest.approx((8000 - 512) * TRUTH.per_kv_token_s, rel=0.1)
    steps = 4 + 2  # 1,024 queued tokens and 512 of its own, in chunks of 256
    expected_s = steps * TRUTH.step_s(7, kv) + 1536 * TRUTH.per_prefill_token_s
    assert found.ttft_p50_s == pytest.approx(expected_s, rel=0.05)
    assert found.calibrated
    assert found.itl_p90_s >= 1.5 * found.itl_p50_s


def test_before_a_worker_has_told_enough_its_means_and_the_defaults_hold() -> None:
    estimates = Estimates(prior_costs(DEFAULTS))
    young = beat("w", sample(0), total=1)
    estimates.beat(young)
    assert not predict(side(estimates, young), side(estimates, young), 512, DEFAULTS).calibrated
    load = young.load.model_copy(update={"decode_step_s": 0.5, "prefill_tokens_per_s": 100.0})
    means = young.model_copy(update={"load": load})
    found = predict(side(estimates, means), side(estimates, means), 512, DEFAULTS)
    assert found.calibrated
    assert found.itl_p50_s == pytest.approx(0.5 + DEFAULTS.decode_step_per_sequence_s)
    assert found.ttft_p50_s == pytest.approx(5.12)


def test_an_empty_queue_is_no_wait() -> None:
    estimates = Estimates(prior_costs(DEFAULTS))
    taught(estimates, "w")
    assert queue_wait_s(side(estimates, beat("w", total=200)), DEFAULTS) == 0


def test_steps_told_twice_are_learned_once() -> None:
    estimates = Estimates(prior_costs(DEFAULTS))
    eight = [sample(index) for index in range(8)]
    for total in (8, 8, 8):
        estimates.beat(beat("w", *eight, total=total))
    assert estimates.live()["life-w"].decode_seen == 8
    estimates.beat(beat("w", *eight[3:], *eight[:3], total=11))
    assert estimates.live()["life-w"].decode_seen == 11, "three of those eight are new"
    estimates.beat(beat("w", *eight, total=500))
    assert estimates.live()["life-w"].decode_seen == 19, "of many new ones only the last eight are told"


def test_lives_that_have_ended_are_forgotten() -> None:
    estimates = Estimates(prior_costs(DEFAULTS))
    taught(estimates, "a")
    taught(estimates, "b")
    estimates.keep([Incarnation("life-b")])
    assert len(estimates) == 1
    assert set(estimates.live()) == {"life-b"}


def test_the_worker_whose_steps_are_learned_to_be_cheaper_is_chosen() -> None:
    slow = dataclasses.replace(TRUTH, base_s=0.05, per_prefill_token_s=1e-4)
    estimates = Estimates(prior_costs(DEFAULTS))
    for name, truth, role in (
        ("p1", slow, Role.PREFILL),
        ("p2", TRUTH, Role.PREFILL),
        ("d1", slow, Role.DECODE),
        ("d2", TRUTH, Role.DECODE),
    ):
        taught(estimates, name, truth, role)
    workers = tuple(
        beat(n, total=200, role=Role.PREFILL if n[0] == "p" else Role.DECODE) for n in ("p1", "p2", "d1", "d2")
    )
    view = View(Policy())
    for worker in workers:
        view.beat(worker, 0.0, estimates.live()[worker.incarnation])
    request = RouteRequest(request_id=RequestId("r"), model="demo", isl_tokens=512, max_osl_tokens=16)
    chosen = choose(request, view, lambda: Known(frozenset(), warm=True), Incarnation("planner"), 0.0).route
    assert chosen.prefill is not None
    assert (chosen.prefill.worker_id, chosen.decode.worker_id) == ("p2", "d2")


def test_a_worker_that_takes_another_role_is_not_taken_to_prefill_all_the_time() -> None:
    """Else a new decode worker is predicted to be ten times as slow as it is, and gets nothing to prove otherwise."""
    estimates = Estimates(prior_costs(DEFAULTS))
    prompts = [StepSample(step_s=0.3, decode_sequences=0, prefill_tokens=256, kv_tokens=0) for _ in range(8)]
    prefilled = beat("w", *prompts, total=8, role=Role.PREFILL)
    estimates.beat(prefilled)
    assert estimates.live()[prefilled.incarnation].prefill_share > 0.2
    estimates.beat(beat("w", *prompts, total=8, role=Role.DECODE))
    assert estimates.live()[prefilled.incarnation].prefill_share == 0.0


def test_a_worker_that_loads_another_model_is_learned_anew() -> None:
    estimates = Estimates(prior_costs(DEFAULTS))
    first = beat("w", *[sample(index) for index in range(8)], total=8)
    estimates.beat(first)
    other = first.model_copy(update={"model": "other"})
    estimates.beat(other)
    assert first.incarnation not in estimates.live(), "those steps were the other model's"
    estimates.beat(other.model_copy(update={"load": other.load.model_copy(update={"steps_total": 10})}))
    assert estimates.live()[first.incarnation].decode_seen == 2


def test_costs_beyond_the_present_load_are_known_from_what_was_seen_before() -> None:
    """A context that has grown over a minute tells what its tokens cost; the latest seconds alone do not."""
    estimates = Estimates(prior_costs(DEFAULTS))
    truth = StepCosts(base_s=6e-3, per_sequence_s=30e-6, per_kv_token_s=50e-9, per_prefill_token_s=10e-6)
    for number in range(150):
        sequences, tokens = 8 + number % 5, (8 + number % 5) * (1000 + 25 * number)
        step = StepSample(
            step_s=truth.step_s(sequences, tokens), decode_sequences=sequences, prefill_tokens=0, kv_tokens=tokens
        )
        estimates.beat(beat("w", step, total=number + 1))
    steady = estimates.steady()[Incarnation("life-w")].costs
    assert steady.step_s(32, 32 * 8000) == pytest.approx(truth.step_s(32, 32 * 8000), rel=0.1)


def test_the_share_of_time_that_prompts_take_is_of_all_time_so_that_an_idle_worker_has_none() -> None:
    estimates, total = Estimates(prior_costs(DEFAULTS)), 0
    life = Incarnation("life-w")

    def mixed(tokens: int) -> StepSample:
        return StepSample(
            step_s=TRUTH.step_s(4, 8000, tokens), decode_sequences=4, prefill_tokens=tokens, kv_tokens=8000
        )

    for _ in range(30):  # 20 of each beat's 40 steps have a prompt of 1,000 tokens: 10 ms of it
        total += 40
        estimates.beat(beat("w", *(mixed(1000 * (index % 2)) for index in range(8)), total=total))
    assert estimates.live()[life].prefill_share == pytest.approx(20 * 0.01 / 0.5, rel=0.1)
    for _ in range(20):
        estimates.beat(beat("w", total=total, running=0))
    assert estimates.live()[life].prefill_share < 0.01
