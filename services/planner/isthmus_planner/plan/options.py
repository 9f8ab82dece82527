"""One way to place roles, with what it is predicted to give and what the simulator says of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus_planner.plan.capacity import Offer, Offers
from isthmus_planner.plan.mix import Mix
from isthmus_planner.plan.search import Assignment
from isthmus_planner.plan.simulating import Simulated
from isthmus_planner.sim.hardware import Role


@dataclass(frozen=True, slots=True)
class Range:
    """p90: what nine in ten real clusters would do at least as well as, by the model's own error."""

    p50: float
    p90: float


@dataclass(frozen=True, slots=True)
class Option:
    assignment: Assignment
    requests_per_s: Range
    output_tokens_per_s: Range
    total_tokens_per_s: Range
    usd_per_m_output_tokens: Range | None
    ttft_s: Range
    itl_s: Range
    calibrated: bool
    """Whether all constants that it rests on were fitted to measurements of these very accelerators and this model."""
    simulated: Simulated | None
    bottleneck: str

    @property
    def steady_requests_per_s(self) -> float:
        """The simulator's where it has settled."""
        found = self.simulated
        return found.requests_per_s if found is not None and found.steady else self.requests_per_s.p50


def make_option(offers: Sequence[Offers], assignment: Assignment, mix: Mix, simulated: Simulated | None) -> Option:
    rate = assignment.requests_per_s
    cautious = _cautious_rate(offers, assignment)
    used = _used(offers, assignment)
    requests = Range(rate, cautious)
    output = Range(rate * mix.osl_tokens, cautious * mix.osl_tokens)
    both = mix.isl_tokens + mix.osl_tokens
    price = None
    if assignment.usd_per_h is not None:
        hourly = assignment.usd_per_h / 3600 * 1e6
        price = Range(hourly / output.p50, hourly / output.p90)
    return Option(
        assignment=assignment,
        requests_per_s=requests,
        output_tokens_per_s=output,
        total_tokens_per_s=Range(rate * both, cautious * both),
        usd_per_m_output_tokens=price,
        ttft_s=_latency(used, (Role.PREFILL, Role.AGGREGATED), "ttft"),
        itl_s=_latency(used, (Role.DECODE, Role.AGGREGATED), "tpot"),
        calibrated=all(offer.constants.calibrated for _, offer, _ in used),
        simulated=simulated,
        bottleneck=bottleneck(offers, assignment),
    )


def bottleneck(offers: Sequence[Offers], assignment: Assignment) -> str:
    """Of what crosses, the side that has no rate to spare; else what limits the aggregated servers."""
    if not assignment.disaggregated:
        return "aggregated: " + _limits(offers, assignment, Role.AGGREGATED)
    rates = {role: _rate(offers, assignment, role) for role in (Role.PREFILL, Role.DECODE)}
    side = min(rates, key=lambda role: rates[role])
    return f"{side.value}: " + _limits(offers, assignment, side)


def _limits(offers: Sequence[Offers], assignment: Assignment, role: Role) -> str:
    found = {
        each.by_role[role].limit
        for each, counts in zip(offers, assignment.counts, strict=True)
        if counts[role] > 0 and role in each.by_role
    }
    return ", ".join(sorted(found))


def _rate(offers: Sequence[Offers], assignment: Assignment, role: Role, quantity: str | None = None) -> float:
    return math.fsum(
        counts[role] * offer.requests_per_s / (offer.constants.spread_of(quantity) if quantity else 1.0)
        for each, counts in zip(offers, assignment.counts, strict=True)
        for offer in (each.by_role.get(role),)
        if offer is not None
    )


def _cautious_rate(offers: Sequence[Offers], assignment: Assignment) -> float:
    crossing = min(_rate(offers, assignment, role, "throughput") for role in (Role.PREFILL, Role.DECODE))
    return crossing + _rate(offers, assignment, Role.AGGREGATED, "throughput")


def _used(offers: Sequence[Offers], assignment: Assignment) -> list[tuple[Offers, Offer, float]]:
    """Each type and role that has servers, with the rate of those."""
    return [
        (each, each.by_role[role], counts[role] * each.rate(role))
        for each, counts in zip(offers, assignment.counts, strict=True)
        for role in Role
        if counts[role] > 0 and role in each.by_role
    ]


def _latency(used: list[tuple[Offers, Offer, float]], roles: tuple[Role, ...], quantity: str) -> Range:
    """Mean over the servers by their rates; p90 by the least certain of them."""
    parts = [(each, offer, rate) for each, offer, rate in used if offer.role in roles]
    total = math.fsum(rate for _, _, rate in parts)
    values = [offer.ttft_s if quantity == "ttft" else offer.itl_s for _, offer, _ in parts]
    p50 = math.fsum(rate * value for (_, _, rate), value in zip(parts, values, strict=True)) / total
    return Range(p50, p50 * max(offer.constants.spread_of(quantity) for _, offer, _ in parts))
