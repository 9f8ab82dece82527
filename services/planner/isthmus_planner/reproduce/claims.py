"""Each published statement beside its simulation. Words are checked as orderings, with the tolerances stated here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from isthmus_planner.reproduce.cross_vendor import Cell, CrossVendorRun
from isthmus_planner.reproduce.deepseek import DeepSeekRun
from isthmus_planner.reproduce.published import Claim, CrossVendor, DeepSeek

PARITY = 0.05
"""Both ratios within so much of 1."""
CLEARLY = 0.08
"""E2EL smaller by at least so much."""
RATIO_TOLERANCE = 0.08
MEAN_TOLERANCE = 0.02
RATE_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Check:
    case: str
    says: str
    published: float | None
    """None where only words were published."""
    simulated: str
    error: float | None
    """Relative, where a number was published."""
    tolerance: float
    holds: bool


def cross_vendor_checks(report: CrossVendor, run: CrossVendorRun) -> list[Check]:
    checks = [_check(claim, [run.cell(claim.scenario, c) for c in claim.concurrency]) for claim in report.claims]
    for name, published, found in (
        ("E2EL", report.e2el_geometric_mean, run.e2el_geometric_mean),
        ("TPS", report.tps_geometric_mean, run.tps_geometric_mean),
    ):
        checks.append(_number("all", f"geometric mean {name} {published:.2f}", published, found, MEAN_TOLERANCE))
    return checks


def deepseek_checks(report: DeepSeek, run: DeepSeekRun) -> list[Check]:
    rates = report.output_tokens_per_s
    rows = (
        ("MI300X alone", rates.fast_alone, run.fast_alone),
        ("MI308X alone", rates.slow_alone, run.slow_alone),
        ("three servers side by side (a sum)", rates.balanced, run.balanced),
        ("prefill on MI300X, decode on MI308X", rates.disaggregated, run.disaggregated),
    )
    return [
        _number("DeepSeek-R1", f"{name}: {rate:.2f} tok/s", rate, found, RATE_TOLERANCE, digits=2)
        for name, rate, found in rows
    ]


def _check(claim: Claim, cells: list[Cell]) -> Check:
    if claim.order is not None:
        return _order(claim, cells)
    (cell,) = cells
    if claim.e2el_ratio is not None:
        return _number(claim.scenario, claim.says, claim.e2el_ratio, cell.e2el_ratio, RATIO_TOLERANCE)
    if claim.tps_ratio is not None:
        return _number(claim.scenario, claim.says, claim.tps_ratio, cell.tps_ratio, RATIO_TOLERANCE)
    if claim.cross_tps_above is not None:
        holds = cell.cross_tps > claim.cross_tps_above
        return Check(claim.scenario, claim.says, None, f"{cell.cross_tps:,.0f} tok/s", None, 0.0, holds)
    assert claim.single_tps_below is not None
    holds = cell.single_tps < claim.single_tps_below
    return Check(claim.scenario, claim.says, None, f"{cell.single_tps:,.0f} tok/s", None, 0.0, holds)


def _order(claim: Claim, cells: list[Cell]) -> Check:
    ratios = [cell.e2el_ratio for cell in cells]
    tolerance = 0.0
    if claim.order == "parity":
        tolerance = PARITY
        holds = all(abs(ratio - 1) <= PARITY for cell in cells for ratio in (cell.e2el_ratio, cell.tps_ratio))
    elif claim.order == "cross":
        holds = all(cell.e2el_ratio < 1 < cell.tps_ratio for cell in cells)
    elif claim.order == "single":
        holds = all(cell.tps_ratio < 1 < cell.e2el_ratio for cell in cells)
    elif claim.order == "clearly_cross":
        tolerance = CLEARLY
        holds = all(ratio <= 1 - CLEARLY for ratio in ratios)
    else:
        holds = all(later < earlier for earlier, later in itertools.pairwise(ratios))
    shown = "E2EL " + ", ".join(f"{ratio:.3f}" for ratio in ratios)
    return Check(claim.scenario, claim.says, None, shown, None, tolerance, holds)


def _number(case: str, says: str, published: float, found: float, tolerance: float, *, digits: int = 3) -> Check:
    error = found / published - 1
    return Check(case, says, published, f"{found:.{digits}f}", error, tolerance, abs(error) <= tolerance)
