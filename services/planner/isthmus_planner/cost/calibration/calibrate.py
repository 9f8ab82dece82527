"""From measurements to constants with their errors. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from isthmus_planner.cost.calibration.evaluation import (
    Errors,
    errors_of,
    leave_one_accelerator_out,
    leave_one_out,
    pooled,
    spread_of,
)
from isthmus_planner.cost.calibration.groups import Array, Group, GroupKey, Subject, grouped
from isthmus_planner.cost.calibration.hierarchy import fit_all
from isthmus_planner.cost.calibration.measurements import Measurement
from isthmus_planner.cost.calibration.parameters import constants_of, theta_of
from isthmus_planner.cost.calibration.store import Calibration, GroupFit, Question, Range
from isthmus_planner.cost.constants import Constants
from isthmus_shared.errors import ConfigInvalid


@dataclasses.dataclass(frozen=True, slots=True)
class Elsewhere:
    """What is known from other measurements than those at hand."""

    fits: Mapping[GroupKey, Array]
    facts: Mapping[GroupKey, Subject]


def elsewhere(prior: Calibration) -> Elsewhere:
    known = prior.fits
    return Elsewhere({each.key: theta_of(each.constants) for each in known}, {each.key: each.subject for each in known})


def without(prior: Calibration, groups: Mapping[GroupKey, Group]) -> Calibration:
    """The prior's groups, less any that the measurements at hand may have gone into: those of the same pair of
    accelerator and model."""
    pairs = {(key.accelerator, key.model) for key in groups}
    kept = tuple(each for each in prior.fits if (each.key.accelerator, each.key.model) not in pairs)
    return dataclasses.replace(prior, fits=kept)


def groups_of(measurements: Sequence[Measurement]) -> dict[GroupKey, Group]:
    """Raises `ConfigInvalid` when there is nothing to fit."""
    if not measurements:
        raise ConfigInvalid("no measurement can be used", todo="see which rows were left out, and why")
    return grouped(measurements)


@dataclasses.dataclass(frozen=True, slots=True)
class Calibrated:
    calibration: Calibration
    inside: Mapping[GroupKey, Errors]
    """Of the measurements that the constants were fitted to."""
    outside: Mapping[GroupKey, Errors]
    """Of each configuration by constants that were fitted without it."""


def calibrate(groups: Mapping[GroupKey, Group], prior: Calibration, source: str) -> Calibrated:
    """Constants of every group, their errors in and out of sample, and the spreads that those give."""
    known = elsewhere(prior)
    fits = fit_all(groups, known.fits, known.facts)
    inside = errors_of(groups, {key: constants_of(theta) for key, theta in fits.items()})
    outside = leave_one_out(groups, fits, known.fits, known.facts)
    calibration = Calibration(
        source=source,
        fits=tuple(_group_fit(group, fits[key], inside[key], outside[key], source) for key, group in groups.items()),
        specification_spread=specification_spread(groups, prior),
    )
    return Calibrated(calibration, inside, outside)


def specification_spread(groups: Mapping[GroupKey, Group], prior: Calibration) -> Mapping[str, float]:
    """From leaving whole accelerators out, each counting alike; with a single one, what the prior knew."""
    if len({key.accelerator for key in groups}) < 2:
        return prior.specification_spread
    by_accelerator = pooled(leave_one_accelerator_out(groups), lambda key: key.accelerator)
    return spread_of(list(by_accelerator.values()))


def constants_known(groups: Mapping[GroupKey, Group], calibration: Calibration) -> dict[GroupKey, Constants]:
    """What a calibration made elsewhere says of these groups; from specification where they were not measured."""
    found = {}
    for key, group in groups.items():
        row = group.rows[0]
        found[key] = calibration.constants_for(Question(row.accelerator, row.model, row.layout, row.framework))
    return found


def extrapolations(groups: Mapping[GroupKey, Group], calibration: Calibration) -> dict[int, str]:
    """Lines whose configuration lies beyond what the constants were measured on, and why."""
    found = {}
    for group in groups.values():
        for row in group.rows:
            question = Question(
                row.accelerator,
                row.model,
                row.layout,
                row.framework,
                row.concurrency,
                row.isl_tokens,
                row.osl_tokens,
            )
            known = calibration.find(question)
            beyond = [f"{group.subject.key} was never measured"] if known is None else known.range.outside(question)
            if beyond:
                found[row.line] = "; ".join(beyond)
    return found


def _group_fit(group: Group, theta: Array, inside: Errors, outside: Errors, source: str) -> GroupFit:
    key = group.subject.key
    constants = constants_of(
        theta,
        source=f"{len(group)} measurements of {key} ({source})",
        calibrated=True,
        spread={**inside.spread(), **outside.spread()},
    )
    errors = {"in_sample": inside.means(), "left_out": outside.means()}
    return GroupFit(group.subject, len(group), constants, Range.of(group), errors)
