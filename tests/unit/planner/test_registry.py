from __future__ import annotations

from isthmus_planner.registry import VERDICT_S, Registry, ref_of
from isthmus_shared.ids import Incarnation, NodeId, WorkerId
from isthmus_shared.messages.health import LOST_AFTER_BEATS, ProcessState, Role, WorkerHeartbeat, WorkerLoad


def beat(worker: str = "w1", life: str = "a", *, model: str = "demo") -> WorkerHeartbeat:
    return WorkerHeartbeat(
        incarnation=Incarnation(life),
        state=ProcessState.READY,
        interval_s=0.5,
        worker_id=WorkerId(worker),
        node_id=NodeId("n1"),
        roles=(Role.DECODE,),
        vendor="cpu",
        engine="sim",
        model=model,
        model_fingerprint="f",
        kv_form="fp32",
        kv_layout="nhd:16:fp32",
        max_model_len_tokens=4096,
        kv_block_tokens=16,
        load=WorkerLoad(kv_blocks_total=10, kv_blocks_free=10),
    )


def lives(registry: Registry) -> list[str]:
    registry.check_invariants()
    return [worker.incarnation for worker in registry.workers]


def test_a_worker_is_lost_after_four_silent_intervals_and_not_before() -> None:
    registry = Registry()
    registry.worker_beat(beat(), 10.0)
    for tick in range(9):
        assert registry.sweep(10.0 + tick * 0.25) == ()
    assert lives(registry) == ["a"]
    (lost,) = registry.sweep(10.0 + LOST_AFTER_BEATS * 0.5 + 0.01)
    assert lost.worker == ref_of(beat())
    assert lives(registry) == []


def test_a_silent_worker_is_back_with_its_first_beat() -> None:
    registry = Registry()
    registry.worker_beat(beat(), 0.0)
    for tick in range(12):
        registry.sweep(tick * 0.25)
    assert lives(registry) == []
    registry.worker_beat(beat(), 3.0)
    assert lives(registry) == ["a"]


def test_a_restart_replaces_the_old_life_at_once_and_its_late_beat_is_refused() -> None:
    registry = Registry()
    registry.worker_beat(beat(life="a"), 0.0)
    (lost,) = registry.worker_beat(beat(life="b"), 0.1)
    assert lost.worker.incarnation == "a"
    assert registry.worker_beat(beat(life="a"), 0.2) == ()
    assert lives(registry) == ["b"]


def test_beats_of_a_life_declared_lost_are_refused_until_they_can_only_be_new() -> None:
    registry = Registry()
    registry.worker_beat(beat(), 0.0)
    assert registry.worker_lost(ref_of(beat()), 0.1)
    registry.worker_beat(beat(), 0.2)
    assert lives(registry) == []
    registry.worker_beat(beat(), 0.1 + VERDICT_S + 0.1)
    assert lives(registry) == ["a"]


def test_a_verdict_that_overtakes_the_last_beat_still_holds() -> None:
    registry = Registry()
    assert not registry.worker_lost(ref_of(beat()), 0.0)
    registry.worker_beat(beat(), 0.1)
    assert lives(registry) == []


def test_the_loss_of_an_old_life_leaves_the_new_one_alone() -> None:
    registry = Registry()
    registry.worker_beat(beat(life="b"), 0.0)
    assert not registry.worker_lost(ref_of(beat(life="a")), 0.1)
    assert lives(registry) == ["b"]


def test_a_planner_that_was_held_up_blames_nobody() -> None:
    registry = Registry()
    registry.worker_beat(beat(), 0.0)
    registry.sweep(0.1)
    assert registry.sweep(60.0) == ()
    assert lives(registry) == ["a"]
    for tick in range(1, 9):
        registry.sweep(60.0 + tick * 0.25)
    assert lives(registry) == [], "after the pardon the same silence counts"


def test_a_model_is_remembered_after_its_last_worker_went() -> None:
    registry = Registry()
    registry.worker_beat(beat(model="demo"), 0.0)
    registry.worker_lost(ref_of(beat()), 0.1)
    assert registry.knows_model("demo")
    assert not registry.knows_model("other")


def test_silence_while_the_bus_was_away_means_nothing() -> None:
    registry = Registry()
    registry.worker_beat(beat(), 0.0)
    for tick in range(100):
        assert registry.sweep(tick * 0.25, deaf=True) == ()
    assert registry.sweep(25.0) == ()
    assert lives(registry) == ["a"]
