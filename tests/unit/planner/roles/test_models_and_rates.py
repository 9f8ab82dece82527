"""Which worker serves which model, and what a lane may carry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus_planner.cost.online import StepCosts
from isthmus_planner.roles.capacity import Ability
from isthmus_planner.roles.mix import Kind, Mix
from isthmus_planner.roles.models import Allocator, ModelChange, ModelPolicy, ModelPool
from isthmus_planner.roles.rates import FLOOR_SHARE, HOST_S_PER_BYTE, Receiver, Sender, lane_rates, most_bytes_per_s
from isthmus_shared.ids import Incarnation, NodeId, WorkerId
from isthmus_shared.messages.health import Role
from isthmus_testing.role_pool import ITL_S, ability

POLICY = ModelPolicy()
Loadable = dict[WorkerId, frozenset[str]]


def named(model: str, count: int) -> list[Ability]:
    return [ability(f"{model}{n}", Role.PREFILL if n == 0 else Role.DECODE) for n in range(count)]


def pool(model: str, workers: list[Ability], rate_per_s: float | None) -> ModelPool:
    mix = None if rate_per_s is None else Mix(rate_per_s, (Kind(1024, 0, 1024, 1.0),))
    return ModelPool(model, tuple(workers), mix, ITL_S)


def able(*pools: ModelPool) -> Loadable:
    every = frozenset(each.model for each in pools)
    return {worker.worker_id: every for each in pools for worker in each.workers}


class World:
    """Workers that load what they are told, in `loads_s`."""

    def __init__(self, pools: list[ModelPool], loads_s: float = 40.0) -> None:
        self.pools, self.loads_s, self.now_s = pools, loads_s, 0.0
        self.allocator = Allocator(POLICY)
        self.asked: list[ModelChange] = []
        self.outcomes: list[str] = []
        self._loading: tuple[float, Ability, str] | None = None
        self.slow: float = 1.0
        """Times as slow as its like in the model that it has loaded."""

    def run(self, seconds: int) -> None:
        loadable = able(*self.pools)
        for _ in range(seconds):
            self.now_s += 1.0
            if self._loading is not None and self.now_s >= self._loading[0]:
                _, worker, model = self._loading
                costs = StepCosts(*(self.slow * getattr(worker.costs, name) for name in StepCosts.__slots__))
                self._loading = None
                self._put(replace(worker, costs=costs), model)
            change = self.allocator.look(self.pools, loadable, self.now_s)
            self.outcomes += [outcome for _, outcome in self.allocator.take_verdicts()]
            if change is not None and (not self.asked or self.asked[-1] is not change):
                self.asked.append(change)
                worker = next(w for p in self.pools for w in p.workers if w.worker_id == change.worker_id)
                self.pools = [each.without(change.worker_id) for each in self.pools]
                self._loading = self.now_s + self.loads_s, replace(worker, roles=change.roles), change.model

    def _put(self, worker: Ability, model: str) -> None:
        self.pools = [
            replace(each, workers=(*each.workers, worker)) if each.model == model else each for each in self.pools
        ]

    def sizes(self) -> dict[str, int]:
        return {each.model: len(each.workers) for each in self.pools}


def test_workers_move_to_the_model_that_needs_them_one_at_a_time_until_it_does_not() -> None:
    world = World([pool("a", named("a", 6), 0.4), pool("b", named("b", 2), 8.0)])
    before = max(each.load() for each in world.pools)
    world.run(600)
    assert before > 1.5
    assert max(each.load() for each in world.pools) < 1.0
    assert set(world.outcomes) == {"kept"}
    assert all(change.was == "a" for change in world.asked)
    assert [b.at_s - a.at_s >= world.loads_s for a, b in zip(world.asked, world.asked[1:], strict=False)] != []
    assert world.sizes()["a"] >= POLICY.spare_workers
    settled = len(world.asked)
    world.run(2000)
    assert len(world.asked) == settled


def test_a_model_that_is_asked_for_keeps_one_worker_for_each_role() -> None:
    world = World([pool("a", named("a", 2), 0.1), pool("b", named("b", 2), 9.0)])
    world.run(600)
    assert world.asked == []
    idle = World([pool("a", named("a", 2), None), pool("b", named("b", 2), 9.0)])
    idle.run(600)
    assert idle.sizes() == {"a": 1, "b": 3}


def test_a_need_that_does_not_last_moves_nobody() -> None:
    calm, needy = pool("b", named("b", 2), 0.1), pool("b", named("b", 2), 9.0)
    allocator, other = Allocator(POLICY), pool("a", named("a", 6), 0.1)
    for second in range(600):
        asked = needy if second % 60 < POLICY.hold_s else calm
        assert allocator.look([other, asked], able(other, asked), float(second)) is None


def test_only_who_can_load_the_model_is_asked() -> None:
    first, second = pool("a", named("a", 6), 0.1), pool("b", named("b", 2), 9.0)
    loadable = able(first, second) | {WorkerId(f"a{n}"): frozenset({"a"}) for n in range(5)}
    allocator = Allocator(POLICY)
    changes = [allocator.look([first, second], loadable, float(now_s)) for now_s in range(60)]
    assert {change.worker_id for change in changes if change is not None} == {"a5"}


def test_a_worker_that_is_of_little_use_there_goes_back_and_is_left_alone() -> None:
    world = World([pool("a", named("a", 6), 0.3), pool("b", named("b", 2), 8.0)])
    world.slow = 60.0
    world.run(180)
    assert world.outcomes[:1] == ["taken back"]
    assert (world.asked[0].model, world.asked[1].model) == ("b", "a")
    assert world.asked[1].worker_id == world.asked[0].worker_id


def test_one_model_alone_moves_nobody() -> None:
    world = World([pool("a", named("a", 4), 99.0)])
    world.run(100)
    assert world.asked == []


# -- rates


def test_the_ceiling_is_what_leaves_the_steps_within_their_target() -> None:
    assert most_bytes_per_s(0.005, 0.010, 1e-9) == pytest.approx(0.5e9)
    # ITL = τ / (1 − u), u = r · κ
    rate = most_bytes_per_s(0.012, 0.020, 2e-9)
    assert 0.012 / (1 - rate * 2e-9) == pytest.approx(0.020)
    assert most_bytes_per_s(0.030, 0.020, 1e-9) == pytest.approx(FLOOR_SHARE * 1e9), "too slow by itself"


def test_lanes_into_a_node_share_its_ceiling_and_a_nodes_own_has_none() -> None:
    def relay(name: str) -> Incarnation:
        return Incarnation(f"relay-{name}")

    senders = [Sender(NodeId(name), relay(name), weight) for name, weight in (("p", 3.0), ("q", 1.0), ("d", 1.0))]
    receivers = [Receiver(NodeId("d"), relay("d"), 0.010, 0.020), Receiver(NodeId("e"), relay("e"), 0.01, 0.02, 1e-9)]
    rates = {(rate.sender, rate.receiver): rate.bytes_per_s for rate in lane_rates(senders, receivers)}
    whole = 0.5 / HOST_S_PER_BYTE
    assert rates[relay("p"), relay("d")] == pytest.approx(0.75 * whole)
    assert rates[relay("q"), relay("d")] == pytest.approx(0.25 * whole)
    assert (relay("d"), relay("d")) not in rates
    measured = [rates[relay(name), relay("e")] for name in ("p", "q", "d")]
    assert sum(measured) == pytest.approx(0.5e9)
    assert lane_rates([], receivers) == ()
