"""One run of `isthmus calibrate`: what was asked, computed once, told in several forms. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from isthmus_planner.cost.calibration import calibrate, codec, evaluation, report
from isthmus_planner.cost.calibration.evaluation import Errors, HeldOut
from isthmus_planner.cost.calibration.groups import GroupKey
from isthmus_planner.cost.calibration.measurements import Catalog, LeftOut, parse
from isthmus_planner.cost.calibration.store import Calibration
from isthmus_shared.errors import ConfigInvalid

HALVES = 3
"""Random halvings that a held-out error is averaged over."""
FEW_POINTS = (3, 6)
"""Points of each group that a new accelerator is fitted to in the report."""
ALL, HALF, NONE = "all", "half", "none"


class Session:
    def __init__(
        self,
        text: str,
        names: Catalog,
        known: Calibration,
        *,
        trusted: bool,
        source: str,
        fit: str = ALL,
        length_ratio: float = 0.9,
        seed: int = 0,
    ) -> None:
        """`known`: constants from elsewhere. `trusted`: they were not fitted to these measurements, so that even its
        groups of the same accelerator and model may be used. Raises `ConfigInvalid`."""
        self._fit, self._points = _plan(fit)
        used, self._left_out = parse(text, names, length_ratio=length_ratio)
        if not used:
            raise ConfigInvalid(
                "no measurement can be used",
                why=_reasons(self._left_out) or "there is none in the file",
                todo="name accelerators and models as the profiles do, or by the path of a YAML profile of your own "
                "(docs/cost-model.md)",
            )
        self._groups = calibrate.groups_of(used)
        self._names = names
        self._known = known if trusted else calibrate.without(known, self._groups)
        self._seed = seed
        self._source = f"{source}, {len(used)} rows used, {len(self._left_out)} left out"

    def refuse_extrapolation(self) -> None:
        """Raises `ConfigInvalid` when constants that were not fitted here are asked beyond their measurements."""
        if self._fit == NONE and self._beyond:
            line, why = min(self._beyond.items())
            raise ConfigInvalid(
                f"line {line} is an extrapolation, and {len(self._beyond) - 1} others are",
                why=why,
                todo="fit to such measurements, or leave out --strict",
            )

    def summary(self) -> str:
        """What was read, and the errors that belong to what was asked."""
        lines = [f"{sum(map(len, self._groups.values()))} measurements in {len(self._groups)} groups"]
        if self._left_out:
            lines.append(f"{len(self._left_out)} left out: {_reasons(self._left_out)}")
        title, errors = self._errors()
        lines += ["", f"Mean error, {title}:", "", report.error_table(errors)]
        if len(self._groups) > 1:
            lines += ["", report.error_table(errors, groups=True)]
        if self._fit == NONE and self._beyond:
            lines += ["", f"{len(self._beyond)} of them lie beyond what those constants were measured on."]
        return "\n".join(lines) + "\n"

    def facts(self) -> dict[str, Any]:
        """The summary as plain values: mean relative errors by quantity, of pairs and of groups."""
        title, errors = self._errors()
        return {
            "measurements": sum(map(len, self._groups.values())),
            "groups": len(self._groups),
            "left_out": dict(Counter(each.why for each in self._left_out)),
            "judged": title,
            "beyond_measured": len(self._beyond) if self._fit == NONE else 0,
            "errors": {name: each.means() for name, each in evaluation.pooled(errors).items()},
            "errors_by_group": {str(key): each.means() for key, each in errors.items()},
        }

    def constants_yaml(self) -> str:
        if self._fit != ALL:
            raise ConfigInvalid("constants are written only when fitted to everything", todo="leave out --fit")
        return codec.dump(self._calibrated.calibration, self._names)

    def predictions(self) -> str:
        """Of every measurement, or of those that were held out from the (first) fit."""
        if self._fit == ALL:
            constants = {each.key: each.constants for each in self._calibrated.calibration.fits}
            return report.predictions_csv(self._groups, constants, {})
        if self._fit == NONE:
            constants = calibrate.constants_known(self._groups, self._known)
            return report.predictions_csv(self._groups, constants, self._beyond)
        held = self._held_out(self._seed)
        return report.predictions_csv(held.judged, held.constants, {})

    def report(self) -> str:
        """Every table of docs/cost-model-errors.md, whatever was asked to be fitted."""
        constants = {each.key: each.constants for each in self._calibrated.calibration.fits}
        halves = self._averaged(None)
        parts = [
            "# Errors of the cost model",
            f"Written by `isthmus calibrate FILE --report` from {self._source}. Each figure is the mean of "
            "|predicted / measured - 1|; the columns are explained in [cost-model.md](cost-model.md).",
            "## Half of the configurations held out",
            f"Constants fitted to a random half of each group, judged on the other; {HALVES} halvings together.",
            report.error_table(halves),
            report.error_table(halves, groups=True),
            "## One configuration left out at a time",
            report.error_table(self._calibrated.outside),
            "## In sample",
            report.error_table(self._calibrated.inside),
        ]
        if len({key.accelerator for key in self._groups}) > 1:
            parts += [
                "## An accelerator that was never measured",
                "From its specification and from what the other accelerators' measurements say:",
                report.error_table(evaluation.leave_one_accelerator_out(self._groups)),
            ]
            for points in FEW_POINTS:
                few = evaluation.leave_one_accelerator_out(self._groups, points=points, seed=self._seed)
                parts += [f"The same with {points} points of each of its groups:", report.error_table(few)]
        parts += ["## Constants, fitted to everything", report.constants_table(constants)]
        return "\n\n".join(parts) + "\n"

    @cached_property
    def _calibrated(self) -> calibrate.Calibrated:
        return calibrate.calibrate(self._groups, self._known, self._source)

    @cached_property
    def _beyond(self) -> Mapping[int, str]:
        return calibrate.extrapolations(self._groups, self._known)

    def _errors(self) -> tuple[str, Mapping[GroupKey, Errors]]:
        if self._fit == ALL:
            return "each configuration left out of the fit in turn", self._calibrated.outside
        if self._fit == NONE:
            known = calibrate.constants_known(self._groups, self._known)
            return "nothing fitted", evaluation.errors_of(self._groups, known)
        if self._fit == HALF:
            return f"fitted to half and judged on the other, {HALVES} halvings", self._averaged(None)
        return f"fitted to {self._points} points of each group, {HALVES} choices", self._averaged(self._points)

    def _held_out(self, seed: int) -> HeldOut:
        known = calibrate.elsewhere(self._known)
        points = None if self._fit == HALF else self._points
        return evaluation.hold_out(self._groups, known.fits, known.facts, points=points, seed=seed)

    def _averaged(self, points: int | None) -> dict[GroupKey, Errors]:
        known = calibrate.elsewhere(self._known)
        total: dict[GroupKey, Errors] = {key: Errors() for key in self._groups}
        for seed in range(self._seed, self._seed + HALVES):
            held = evaluation.hold_out(self._groups, known.fits, known.facts, points=points, seed=seed)
            for key, each in held.errors().items():
                total[key].merge(each)
        return total


def _plan(fit: str) -> tuple[str, int]:
    if fit in (ALL, HALF, NONE):
        return fit, 0
    if fit.isascii() and fit.isdigit() and 0 < int(fit) < 1_000_000:
        return "points", int(fit)
    raise ConfigInvalid(f"--fit {fit!r}", todo="give all, half, none or a number of points", param="fit")


def _reasons(left_out: Iterable[LeftOut]) -> str:
    counted = Counter(each.why for each in left_out)
    return "; ".join(f"{count} x {why}" for why, count in counted.most_common())
