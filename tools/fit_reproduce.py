"""Fit the six constants of `isthmus reproduce` to the cross-vendor report, and print them for data/constants.yaml.

python tools/fit_reproduce.py [--evaluations 300]   # minutes; nothing is written
"""

from __future__ import annotations

import argparse
import dataclasses
import math

import numpy as np
from scipy.optimize import minimize

from isthmus_planner.reproduce.claims import cross_vendor_checks
from isthmus_planner.reproduce.constants import CrossFitted, constants
from isthmus_planner.reproduce.cross_vendor import CrossVendorRun, run_cross_vendor
from isthmus_planner.reproduce.published import Claim, CrossVendor, published

RATIO_SIGMA, MEAN_SIGMA, ORDER_SIGMA = 0.03, 0.006, 0.002
"""How far off counts as one."""
MARGIN = 0.01
"""Orderings are wanted by this much, so that another seed keeps them."""


def misfit(report: CrossVendor, run: CrossVendorRun) -> float:
    """The sum of squares over all statements: numbers by their distance, orderings by how far they are violated."""
    total = 0.0
    for check in cross_vendor_checks(report, run):
        if check.error is not None:
            sigma = MEAN_SIGMA if check.case == "all" else RATIO_SIGMA
            total += (check.error / sigma) ** 2
    for claim in report.claims:
        total += sum((each / ORDER_SIGMA) ** 2 for each in _violations(claim, run))
    return total


def _violations(claim: Claim, run: CrossVendorRun) -> list[float]:
    cells = [run.cell(claim.scenario, concurrency) for concurrency in claim.concurrency]
    logs = [math.log(cell.e2el_ratio) for cell in cells]
    if claim.order == "parity":
        return [max(0.0, abs(each) - 0.03) for each in logs]
    if claim.order == "single":
        return [max(0.0, MARGIN / 4 - each) for each in logs]
    if claim.order in ("cross", "clearly_cross"):
        return [max(0.0, each + MARGIN) for each in logs]
    if claim.cross_tps_above is not None:
        return [max(0.0, 1.01 - cells[0].cross_tps / claim.cross_tps_above)]
    if claim.single_tps_below is not None:
        return [max(0.0, cells[0].single_tps / claim.single_tps_below - 0.99)]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evaluations", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    report, start = published().cross_vendor, constants()
    names = [field.name for field in dataclasses.fields(CrossFitted)]
    first = np.array([getattr(start.cross_fitted, name) for name in names])

    def at(logs: np.ndarray) -> CrossFitted:
        return CrossFitted(**dict(zip(names, (first * np.exp(logs)).tolist(), strict=True)))

    def cost(logs: np.ndarray) -> float:
        return misfit(report, run_cross_vendor(report, start.cross_known, at(logs), arguments.seed))

    simplex = np.vstack([np.zeros(len(first)), np.eye(len(first)) * 0.08])
    options = {"maxfev": arguments.evaluations, "initial_simplex": simplex, "xatol": 1e-3, "fatol": 1e-2}
    found = minimize(cost, np.zeros(len(first)), method="Nelder-Mead", options=options)
    for name, value in dataclasses.asdict(at(found.x)).items():
        print(f"    {name}: {value:.4g}")
    print(f"misfit {found.fun:.1f} (from {cost(np.zeros(len(first))):.1f})")


if __name__ == "__main__":
    main()
