"""All of it: both cases, every mechanism switched off in turn, constants counted against figures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from isthmus_planner.reproduce.claims import Check, cross_vendor_checks, deepseek_checks
from isthmus_planner.reproduce.constants import MECHANISMS, ReproduceConstants, constants
from isthmus_planner.reproduce.cross_vendor import CrossVendorRun, run_cross_vendor
from isthmus_planner.reproduce.deepseek import DeepSeekRun, run_deepseek
from isthmus_planner.reproduce.published import Published, published

FORMAT = "isthmus-reproduce/1"
DIGITS = 6
INTERFERENCE = "aggregated_interference"
CAUTION = (
    "A fitted mechanism is not a proven cause: its constant was chosen so that these figures come out. "
    "Others may fit as well, and the report publishes none of what would tell them apart."
)

OnStep = Callable[[str, int, int], None]
"""What is simulated now, how many simulations were before it, and how many there are."""


def _silent(_what: str, _done: int, _total: int) -> None:
    return


@dataclass(frozen=True, slots=True)
class Ablation:
    """The same with one mechanism off and all other constants as they are."""

    mechanism: str
    e2el_geometric_mean: float
    tps_geometric_mean: float
    held: int
    """Of the statements."""
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reproduction:
    published: Published
    constants: ReproduceConstants
    run: CrossVendorRun
    checks: tuple[Check, ...]
    ablations: tuple[Ablation, ...]
    deepseek: DeepSeekRun
    deepseek_without_interference: DeepSeekRun
    deepseek_checks: tuple[Check, ...]
    seed: int

    @property
    def fitted(self) -> int:
        return len(dataclasses.fields(self.constants.cross_fitted))

    @property
    def numbers(self) -> int:
        """Published figures of the cross-vendor case, words apart."""
        return sum(check.error is not None or check.says.endswith("tok/s") for check in self.checks)

    @property
    def ordered(self) -> int:
        """Operating points whose order was published."""
        claims = self.published.cross_vendor.claims
        return len({(each.scenario, c) for each in claims if each.order is not None for c in each.concurrency})

    @property
    def holds(self) -> bool:
        return all(check.holds for check in (*self.checks, *self.deepseek_checks))


def reproduce(*, seed: int = 0, ablations: bool = True, on_step: OnStep = _silent) -> Reproduction:
    """Seconds once the simulator is compiled."""
    reports, known = published(), constants()
    report, fitted = reports.cross_vendor, known.cross_fitted
    mechanisms = MECHANISMS if ablations else ()
    steps = 2 + len(mechanisms)
    on_step("the cross-vendor report", 0, steps)
    run = run_cross_vendor(report, known.cross_known, fitted, seed)
    switched = []
    for number, mechanism in enumerate(mechanisms, 1):
        on_step(f"without {mechanism}", number, steps)
        without = run_cross_vendor(report, known.cross_known, fitted.without(mechanism), seed)
        found = cross_vendor_checks(report, without)
        lost = tuple(f"{check.case}: {check.says}" for check in found if not check.holds)
        switched.append(
            Ablation(mechanism, without.e2el_geometric_mean, without.tps_geometric_mean, len(found) - len(lost), lost)
        )
    on_step("the DeepSeek-R1 case", steps - 1, steps)
    deepseek = run_deepseek(reports.deepseek, known.deepseek, known.deepseek.fitted.interference, seed)
    return Reproduction(
        published=reports,
        constants=known,
        run=run,
        checks=tuple(cross_vendor_checks(report, run)),
        ablations=tuple(switched),
        deepseek=deepseek,
        deepseek_without_interference=run_deepseek(reports.deepseek, known.deepseek, 0.0, seed),
        deepseek_checks=tuple(deepseek_checks(reports.deepseek, deepseek)),
        seed=seed,
    )


def reproduction_bytes(found: Reproduction) -> bytes:
    """JSON, the same bytes for the same seed."""
    text = json.dumps(_rounded(fields(found)), sort_keys=True, indent=1, allow_nan=False)
    return text.encode() + b"\n"


def fields(found: Reproduction) -> dict[str, Any]:
    cross, deepseek = found.published.cross_vendor, found.published.deepseek
    return {
        "format": FORMAT,
        "seed": found.seed,
        "caution": CAUTION,
        "holds": found.holds,
        "cross_vendor": {
            "source": cross.source,
            "url": cross.url,
            "cells": [
                asdict(cell) | {"e2el_ratio": cell.e2el_ratio, "tps_ratio": cell.tps_ratio} for cell in found.run.cells
            ],
            "checks": [asdict(check) for check in found.checks],
            "ablations": [asdict(each) for each in found.ablations],
            "fitted": asdict(found.constants.cross_fitted),
            "fitted_constants": found.fitted,
            "published_numbers": found.numbers,
            "ordered_operating_points": found.ordered,
            "fitted_to": found.constants.cross_figures,
        },
        "deepseek": {
            "source": deepseek.source,
            "url": deepseek.url,
            "checks": [asdict(check) for check in found.deepseek_checks],
            "without_" + INTERFERENCE: asdict(found.deepseek_without_interference),
            "fitted": found.constants.deepseek.fitted.model_dump(),
            "assumed": found.constants.deepseek.assumed.model_dump(),
        },
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
