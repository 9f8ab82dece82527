"""From the two files to a plan: offers, search, simulation of the finalists, explanation. Reads profiles and traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus_planner.cost import catalog
from isthmus_planner.cost.calibration import packaged
from isthmus_planner.cost.calibration.store import Calibration, Question
from isthmus_planner.cost.constants import Constants
from isthmus_planner.cost.layout import Layout
from isthmus_planner.cost.profiles import AcceleratorProfile, ModelProfile
from isthmus_planner.plan import explain
from isthmus_planner.plan.capacity import NodeType, Offers, Targets, offers
from isthmus_planner.plan.inputs import ClusterFile, NodeTypeSpec, WorkloadFile, accelerator
from isthmus_planner.plan.mix import Kind, Mix, lengths
from isthmus_planner.plan.options import Option, make_option
from isthmus_planner.plan.search import (
    SERVES_SOMETHING,
    Assignment,
    Wish,
    assign,
    frontier,
    usd_per_request,
)
from isthmus_planner.plan.simulating import Bench
from isthmus_planner.plan.traces import trace_kind
from isthmus_planner.sim.hardware import Role
from isthmus_shared.errors import ConfigInvalid

NEAR_CHEAPEST = 1.10
"""Objective `both`: the fastest plan that costs at most a tenth more per token than the cheapest."""
BETTER_BY = 1.02
"""The simulator overrules the closed forms only by more than they err."""
ALL_ROLES = frozenset(Role)
AGGREGATED_ONLY = frozenset({Role.AGGREGATED})
SPLIT_ONLY = frozenset({Role.PREFILL, Role.DECODE})


@dataclass(frozen=True, slots=True)
class Plan:
    model: ModelProfile
    mix: Mix
    targets: Targets
    objective: str
    wanted_per_s: float | None
    offers: tuple[Offers, ...]
    recommended: Option
    aggregated: Option | None
    """The best without any crossing; None where no node can work so."""
    disaggregated: Option | None
    """The best in which every request crosses."""
    fractional: Assignment
    """With servers divided between roles: what finer splitting could bring."""
    pareto: tuple[Option, ...]
    """From cheap to fast; empty where a price is unknown."""
    verdict: str
    reasons: tuple[str, ...]
    one_more: tuple[explain.OneMore, ...]
    settings: explain.Settings | None
    """None where nothing crosses."""
    seed: int


def make_plan(
    cluster: ClusterFile,
    workload: WorkloadFile,
    base: Path,
    *,
    calibration: Calibration | None = None,
    seed: int = 0,
) -> Plan:
    """`base`: the folder that profile files are relative to; `calibration`: by default the package's.

    Raises `ConfigInvalid` when nothing can be planned.
    """
    known = calibration if calibration is not None else packaged.constants()
    model, mix = catalog.model(workload.model), _mix(workload)
    targets = Targets(_seconds(workload.ttft_ms), _seconds(workload.itl_ms))
    kinds = tuple(_node_type(spec, model, mix, known, base) for spec in _unique(cluster.nodes))
    found = tuple(
        offers(
            kind,
            model,
            mix,
            targets,
            relay=cluster.relay,
            kv_precision=workload.kv_precision,
            max_batch=workload.max_batch,
        )
        for kind in kinds
    )
    _require_prices(kinds, workload)
    most = assign(found, Wish())
    if most is None or most.requests_per_s <= SERVES_SOMETHING:
        raise ConfigInvalid(
            f"no placement serves {model.name} within the targets", why=explain.refusals(found), todo=explain.WAYS_OUT
        )
    bench = Bench(model, mix, targets, cluster.relay, workload.kv_precision, seed)
    return _Planner(found, workload, bench, most).plan()


@dataclass(frozen=True, slots=True)
class _Planner:
    offers: tuple[Offers, ...]
    workload: WorkloadFile
    bench: Bench
    most: Assignment

    def plan(self) -> Plan:
        chosen = self._chosen(ALL_ROLES)
        assert chosen is not None
        aggregated, split = self._chosen(AGGREGATED_ONLY), self._chosen(SPLIT_ONLY)
        simulated: dict[str, Option] = {}
        for one in (chosen, aggregated, split):
            if one is not None and _key(one) not in simulated:
                simulated[_key(one)] = self._option(one, simulate=True)
        best = self._confirmed(simulated[_key(chosen)], list(simulated.values()))
        whole = None if aggregated is None else simulated[_key(aggregated)]
        crossed = None if split is None else simulated[_key(split)]
        fractional = assign(self.offers, Wish(whole=False))
        assert fractional is not None
        return Plan(
            model=self.bench.model,
            mix=self.bench.mix,
            targets=self.bench.targets,
            objective=self.workload.objective,
            wanted_per_s=self.workload.requests_per_s,
            offers=self.offers,
            recommended=best,
            aggregated=whole,
            disaggregated=crossed,
            fractional=fractional,
            pareto=tuple(self._option(point, simulate=False) for point in self._frontier(ALL_ROLES)),
            verdict=explain.verdict(best, whole, crossed, self.workload.requests_per_s),
            reasons=explain.reasons(self.offers, best, self.most, fractional),
            one_more=explain.one_more(self.offers, self.most),
            settings=explain.settings(self.offers, best, self.bench),
            seed=self.bench.seed,
        )

    def _frontier(self, roles: frozenset[Role]) -> list[Assignment]:
        if any(each.node.price_usd_per_h is None for each in self.offers):
            return []
        return frontier(self.offers, roles, self.workload.requests_per_s or 0.0)

    def _chosen(self, roles: frozenset[Role]) -> Assignment | None:
        """By the objective, among plans with these roles. None: they serve nothing."""
        points = self._frontier(roles) if self.workload.objective != "throughput" else []
        if not points:
            fastest = assign(self.offers, Wish(roles=roles))
            return fastest if fastest is not None and fastest.requests_per_s > SERVES_SOMETHING else None
        if self.workload.requests_per_s is not None:
            return min(points, key=lambda each: each.usd_per_h or 0.0)
        cheapest = min(points, key=usd_per_request)
        if self.workload.objective == "price":
            return cheapest
        near = [each for each in points if usd_per_request(each) <= NEAR_CHEAPEST * usd_per_request(cheapest)]
        return max(near, key=lambda each: each.requests_per_s)

    def _option(self, assignment: Assignment, *, simulate: bool) -> Option:
        checked = self.bench.check(self.offers, assignment) if simulate else None
        return make_option(self.offers, assignment, self.bench.mix, checked)

    def _confirmed(self, chosen: Option, finalists: list[Option]) -> Option:
        """The closed forms' choice, unless the simulator finds another finalist clearly better; and aggregated where
        a split brings nothing."""
        best = chosen
        for other in finalists:
            if all(ratio > BETTER_BY for ratio in _ratios(other, best, self.workload.objective)):
                best = other
        if best.assignment.disaggregated:
            for simple in finalists:
                as_good = all(ratio * BETTER_BY >= 1 for ratio in _ratios(simple, best, self.workload.objective))
                if not simple.assignment.disaggregated and as_good:
                    return simple
        return best


def _ratios(one: Option, other: Option, objective: str) -> tuple[float, ...]:
    """Of throughput and, where price counts, of tokens per dollar; by the simulator where it has settled."""
    faster = one.steady_requests_per_s / other.steady_requests_per_s
    if objective == "throughput" or one.assignment.usd_per_h is None or other.assignment.usd_per_h is None:
        return (faster,)
    return faster, faster * other.assignment.usd_per_h / one.assignment.usd_per_h


def _key(assignment: Assignment) -> str:
    return str(assignment.counts)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds * 1e-3


def _mix(workload: WorkloadFile) -> Mix:
    if workload.trace is not None:
        return Mix((trace_kind(workload.trace),), workload.prefix_hit_share)
    total = sum(kind.share for kind in workload.requests)
    kinds = tuple(
        Kind(kind.name, kind.share / total, lengths(kind.isl_tokens), lengths(kind.osl_tokens))
        for kind in workload.requests
    )
    return Mix(kinds, workload.prefix_hit_share)


def _unique(specs: tuple[NodeTypeSpec, ...]) -> tuple[NodeTypeSpec, ...]:
    names = [spec.name or spec.accelerator.lower() for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigInvalid(
                f"two node types are named {name!r}", todo="give each its own `name`, or add up `count`"
            )
    return specs


def _node_type(spec: NodeTypeSpec, model: ModelProfile, mix: Mix, known: Calibration, base: Path) -> NodeType:
    profile = accelerator(spec.accelerator, base)
    each_price = spec.price_usd_per_h if spec.price_usd_per_h is not None else profile.price_usd_per_h
    nic = None if profile.nic_bits_per_s is None else profile.nic_bits_per_s * spec.accelerators
    if spec.nic_gbit_per_s is not None:
        nic = spec.nic_gbit_per_s * 1e9
    choices = spec.tp or tuple(tp for tp in range(1, spec.accelerators + 1) if spec.accelerators % tp == 0)
    odd = [tp for tp in choices if spec.accelerators % tp]
    if odd:
        raise ConfigInvalid(f"tp = {odd[0]} does not divide the {spec.accelerators} accelerators of {profile.name}")
    return NodeType(
        name=spec.name or profile.name,
        accelerator=profile,
        constants_for=_constants_for(spec, profile, model, mix, known),
        count=spec.count,
        accelerators=spec.accelerators,
        price_usd_per_h=None if each_price is None else each_price * spec.accelerators,
        nic_bytes_per_s=None if nic is None else nic / 8,
        tp_choices=choices,
    )


def _constants_for(
    spec: NodeTypeSpec, profile: AcceleratorProfile, model: ModelProfile, mix: Mix, known: Calibration
) -> Callable[[Layout, float | None], Constants]:
    """What measurements say of this pair, or of others like it; an operator's own in their place where given."""

    def found(layout: Layout, concurrency: float | None) -> Constants:
        question = Question(
            profile, model, layout, spec.framework, concurrency, isl_tokens=mix.isl_tokens, osl_tokens=mix.osl_tokens
        )
        constants = known.constants_for(question)
        if not spec.constants:
            return constants
        changed: dict[str, Any] = {**spec.constants, "source": "constants of the cluster file", "calibrated": False}
        return dataclasses.replace(constants, **changed)

    return found


def _require_prices(kinds: tuple[NodeType, ...], workload: WorkloadFile) -> None:
    missing = [kind.name for kind in kinds if kind.price_usd_per_h is None]
    if missing and workload.objective == "price":
        raise ConfigInvalid(
            f"the price of {', '.join(missing)} is unknown",
            why="the objective is price",
            todo="give price_usd_per_h (of one accelerator), or choose objective: throughput",
        )
