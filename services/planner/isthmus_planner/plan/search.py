"""How many servers of each type take which role: a mixed-integer linear programme, solved by SciPy's HiGHS.

p, d, g servers of type i prefill, decode or stay aggregated. Crossing requests X ≤ Σ p·P and X ≤ Σ d·D; what is served
is X + Σ g·A. Without integrality the optimum divides at most the marginal types, as comparative advantage has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from isthmus_planner.plan.capacity import Offers
from isthmus_planner.sim.hardware import Role

ROLES = (Role.PREFILL, Role.DECODE, Role.AGGREGATED)
COST_TIE = 1e-7
"""Weight of price beside throughput (and the other way round), so that among equals the cheaper is taken."""
FRONTIER_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Of the greatest throughput: for each, the cheapest servers that reach it."""
EXACT_SERVERS = 256
"""With more, whole numbers are sought around the divided optimum: what that leaves is a server's worth."""
LEAST_PART = 1000.0
"""Of a divided server: no part smaller than a thousandth of it is of interest."""
NEAR = 1.0
NODE_LIMIT = 2000
"""Of branch and bound: a bound on the work that, unlike one on time, gives the same plan on any machine."""
GAP = 1e-6
SERVES_SOMETHING = 1e-9
WHOLE = 1e-6


@dataclass(frozen=True, slots=True)
class Assignment:
    """Servers by type and role; fractions where they were allowed."""

    counts: tuple[dict[Role, float], ...]
    """In the order of the types."""
    crossing_per_s: float
    """Requests that are prefilled here and decoded there."""
    requests_per_s: float
    usd_per_h: float | None

    def total(self, role: Role) -> float:
        return sum(count[role] for count in self.counts)

    @property
    def disaggregated(self) -> bool:
        return self.crossing_per_s > SERVES_SOMETHING


@dataclass(frozen=True, slots=True)
class Wish:
    """What the programme looks for."""

    whole: bool = True
    roles: frozenset[Role] = frozenset(ROLES)
    at_least_per_s: float = 0.0
    cheapest: bool = False
    """Least price rather than most requests."""


def assign(offers: Sequence[Offers], wish: Wish, extra: int | None = None) -> Assignment | None:
    """None: not even all servers reach `at_least_per_s`. `extra`: the index of a type with one server more."""
    rates = np.array([[offer.rate(role) if role in wish.roles else 0.0 for role in ROLES] for offer in offers])
    counts = np.array([float(offer.node.count + (index == extra)) for index, offer in enumerate(offers)])
    prices = np.array([offer.node.price_usd_per_h or 0.0 for offer in offers])
    programme = _Programme.of(rates, counts, prices, wish)
    if programme is None:
        return None
    whole = wish.whole
    found = programme.solve(whole and counts.sum() <= EXACT_SERVERS)
    if found is not None and whole and counts.sum() > EXACT_SERVERS:
        found = programme.solve(True, near=found)
    return None if found is None else _assignment(found, rates, prices if prices.all() else None, whole)


@dataclass(frozen=True, slots=True)
class _Programme:
    """Variables: p, d, g of each type, then X, in units of the most that could be served."""

    objective: np.ndarray
    constraints: list[LinearConstraint]
    upper: np.ndarray

    @classmethod
    def of(cls, rates: np.ndarray, counts: np.ndarray, prices: np.ndarray, wish: Wish) -> _Programme | None:
        types, size = len(rates), 3 * len(rates) + 1
        # A whole server faster than all of the other side is as good as one just so fast, and so is a part of one
        # that is a thousand times faster; the solver's tolerances want numbers of like size.
        sides = counts @ rates[:, :2] * (1.0 if wish.whole else LEAST_PART)
        capped = np.column_stack([np.minimum(rates[:, 0], sides[1]), np.minimum(rates[:, 1], sides[0]), rates[:, 2]])
        unit = float(min(counts @ rates[:, :2]) + counts @ capped[:, 2])
        if unit <= 0:
            return None
        capped = capped / unit
        served = np.append(np.column_stack([np.zeros((types, 2)), capped[:, 2]]).ravel(), 1.0)
        cost = np.append(np.repeat(prices if prices.any() else np.ones(types), 3), 0.0)
        cost = cost / float(cost[:-1] @ np.repeat(counts, 3))
        rows, upper = _rows(capped, counts, size)
        constraints = [LinearConstraint(rows, -np.inf, upper)]
        if wish.at_least_per_s > 0:
            constraints.append(LinearConstraint(served[np.newaxis], wish.at_least_per_s / unit * (1 - 1e-9), np.inf))
        objective = cost - COST_TIE * served if wish.cheapest else COST_TIE * cost - served
        return cls(objective, constraints, np.append(np.repeat(counts, 3) * (capped.ravel() > 0), np.inf))

    def solve(self, whole: bool, near: np.ndarray | None = None) -> np.ndarray | None:
        """`near`: whole numbers are sought around that solution only."""
        low, high = np.zeros_like(self.upper), self.upper
        if near is not None:
            low = np.append(np.maximum(np.floor(near[:-1]) - NEAR, 0.0), 0.0)
            high = np.minimum(np.append(np.ceil(near[:-1]) + NEAR, np.inf), self.upper)
        integral = np.append(np.full(len(low) - 1, int(whole)), 0)
        options = {"node_limit": NODE_LIMIT, "mip_rel_gap": GAP}
        found = milp(
            self.objective,
            constraints=self.constraints,
            bounds=Bounds(low, high),
            integrality=integral,
            options=options,
        )
        return None if found.x is None else np.asarray(found.x)


def _rows(rates: np.ndarray, counts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows · x ≤ upper: servers of each type, X within prefill, X within decode."""
    types = len(rates)
    rows = np.zeros((types + 2, size))
    for index in range(types):
        rows[index, 3 * index : 3 * index + 3] = 1.0
        rows[types, 3 * index] = -rates[index, 0]
        rows[types + 1, 3 * index + 1] = -rates[index, 1]
    rows[types:, -1] = 1.0
    return rows, np.append(counts, [0.0, 0.0])


def _assignment(x: np.ndarray, rates: np.ndarray, prices: np.ndarray | None, whole: bool) -> Assignment:
    """Rates anew from the counts, so that rounding in the solver shows nowhere."""
    each = x[:-1].reshape(-1, 3)
    each = np.round(each) if whole else np.where(np.abs(each - np.round(each)) < WHOLE, np.round(each), each)
    each += 0.0  # no -0.0
    prefill, decode = float(each[:, 0] @ rates[:, 0]), float(each[:, 1] @ rates[:, 1])
    crossing = min(prefill, decode)
    if crossing <= SERVES_SOMETHING:
        each[:, :2] = 0.0
        crossing = 0.0
    counts = tuple({role: float(each[i, j]) for j, role in enumerate(ROLES)} for i in range(len(each)))
    usd = None if prices is None else float(each.sum(axis=1) @ prices)
    return Assignment(counts, crossing, crossing + float(each[:, 2] @ rates[:, 2]), usd)


def frontier(
    offers: Sequence[Offers], roles: frozenset[Role] = frozenset(ROLES), least_per_s: float = 0.0
) -> list[Assignment]:
    """From cheap to fast: none of them is both slower and dearer per request than another. Needs all prices."""
    most = assign(offers, Wish(roles=roles))
    if most is None or most.requests_per_s <= SERVES_SOMETHING:
        return []
    found: list[Assignment] = []
    for share in FRONTIER_SHARES:
        wanted = min(most.requests_per_s, max(least_per_s, share * most.requests_per_s))
        cheapest = assign(offers, Wish(roles=roles, at_least_per_s=wanted, cheapest=True))
        served = cheapest is not None and cheapest.requests_per_s > SERVES_SOMETHING
        if cheapest is not None and served and cheapest not in found:
            found.append(cheapest)
    kept: list[Assignment] = []
    for one in sorted(found, key=lambda each: (-each.requests_per_s, usd_per_request(each))):
        if not kept or usd_per_request(one) < usd_per_request(kept[-1]) - 1e-15:
            kept.append(one)
    return kept[::-1]


def usd_per_request(assignment: Assignment) -> float:
    assert assignment.usd_per_h is not None
    return assignment.usd_per_h / 3600 / assignment.requests_per_s
