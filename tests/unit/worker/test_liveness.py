from __future__ import annotations

from isthmus_worker.liveness import INGRESS_LOST_S, IngressLife


def sweep_until(life: IngressLife, start_s: float, end_s: float, *, deaf: bool = False) -> frozenset[str]:
    now_s, gone = start_s, frozenset[str]()
    while now_s <= end_s:
        gone = life.sweep(now_s, {"a"}, deaf=deaf)
        now_s += 0.5
    return gone


def test_an_ingress_that_falls_silent_is_gone_after_the_bound_and_not_before() -> None:
    life = IngressLife()
    life.beat("a", 0.0)
    assert sweep_until(life, 0.0, INGRESS_LOST_S) == frozenset()
    assert sweep_until(life, INGRESS_LOST_S + 0.5, INGRESS_LOST_S + 0.5) == {"a"}


def test_a_request_counts_as_a_sign_of_life_of_an_ingress_not_heard_yet() -> None:
    life = IngressLife()
    life.sweep(0.0, (), deaf=False)
    life.expect("a", 0.5)
    assert sweep_until(life, 0.5, 5.0) == frozenset()
    assert sweep_until(life, 5.5, 6.0) == {"a"}


def test_silence_while_the_bus_was_away_means_nothing() -> None:
    life = IngressLife()
    life.beat("a", 0.0)
    assert sweep_until(life, 0.0, 60.0, deaf=True) == frozenset()
    assert sweep_until(life, 60.5, 63.0) == frozenset()


def test_a_worker_that_was_held_up_blames_nobody() -> None:
    life = IngressLife()
    life.beat("a", 0.0)
    life.sweep(0.1, {"a"}, deaf=False)
    assert life.sweep(100.0, {"a"}, deaf=False) == frozenset()


def test_ingresses_that_hold_nothing_here_are_forgotten() -> None:
    life = IngressLife()
    life.beat("b", 0.0)
    life.sweep(0.5, {"a"}, deaf=False)
    assert sweep_until(life, 1.0, 5.5) == frozenset()
    assert life.sweep(6.0, {"a"}, deaf=False) == {"a"}
