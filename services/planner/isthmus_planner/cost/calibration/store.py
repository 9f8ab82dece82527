"""Calibrated constants as a file keeps them: per group, with origin, error and the ranges that were measured. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from isthmus_planner.cost.calibration.groups import QUANTITIES, Array, Group, GroupKey, Subject, subject_of
from isthmus_planner.cost.calibration.hierarchy import prior_for
from isthmus_planner.cost.calibration.parameters import constants_of, theta_of
from isthmus_planner.cost.constants import DEFAULT_SPREAD, Constants
from isthmus_planner.cost.layout import Layout
from isthmus_planner.cost.profiles import AcceleratorProfile, ModelProfile
from isthmus_shared.errors import ConfigInvalid

UNKNOWN_DOUBLINGS = 4.0
"""Sixteen times beyond what was measured no more is known than of an accelerator that never was."""
SLACK = 1.05
"""A range's ends were measured on average lengths; five percent beyond is no extrapolation."""


@dataclass(frozen=True, slots=True)
class Range:
    """Where a group was measured."""

    accelerators: tuple[int, ...]
    concurrency: tuple[float, float]
    isl_tokens: tuple[float, float]
    osl_tokens: tuple[float, float]

    @staticmethod
    def of(group: Group) -> Range:
        def ends(values: Array) -> tuple[float, float]:
            return float(np.min(values)), float(np.max(values))

        sizes = sorted({row.layout.accelerators for row in group.rows})
        return Range(tuple(sizes), ends(group.clients), ends(group.isl_tokens), ends(group.osl_tokens))

    def outside(self, question: Question) -> list[str]:
        """What was asked beyond it, in words; empty: nothing."""
        found = []
        if question.layout.accelerators not in self.accelerators:
            sizes = ", ".join(map(str, self.accelerators))
            found.append(f"{question.layout.accelerators} accelerators (measured: {sizes})")
        for name in ("concurrency", "isl_tokens", "osl_tokens"):
            value, (low, high) = getattr(question, name), getattr(self, name)
            if value is not None and not low / SLACK <= value <= high * SLACK:
                found.append(f"{name} {value:g} (measured: {low:g} to {high:g})")
        return found

    def doublings_beyond(self, question: Question) -> float:
        """How far outside it is, in factors of two along the axis on which that is most; 0 within."""
        size = question.layout.accelerators
        factors = [min(max(size / known, known / size) for known in self.accelerators)]
        for name in ("concurrency", "isl_tokens", "osl_tokens"):
            value, (low, high) = getattr(question, name), getattr(self, name)
            if value is not None:
                factors += [low / value, value / high]
        return max(0.0, math.log2(max(factors)))


@dataclass(frozen=True, slots=True)
class Question:
    """What constants are wanted for; None where it does not matter."""

    accelerator: AcceleratorProfile
    model: ModelProfile
    layout: Layout
    framework: str | None = None
    """None: whichever was measured most."""
    concurrency: float | None = None
    isl_tokens: float | None = None
    osl_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class GroupFit:
    subject: Subject
    points: int
    constants: Constants
    """With its spread, from measurements that were left out of the fit."""
    range: Range
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Mean relative errors: `in_sample` and `left_out`, each per quantity."""

    @property
    def key(self) -> GroupKey:
        return self.subject.key


@dataclass(frozen=True, slots=True)
class Calibration:
    source: str
    """File, rows and digest that the constants come from."""
    fits: tuple[GroupFit, ...]
    specification_spread: Mapping[str, float] = field(default_factory=dict)
    """p90 over p50 of predictions for accelerators that were never measured."""

    def constants_for(self, question: Question, *, strict: bool = False) -> Constants:
        """The best that is known. `calibrated` is True only inside the ranges that were measured.

        Outside of them the spread is wider, see `_wider`, and the source says what was beyond; with `strict` it is a
        `ConfigInvalid`. What was never measured gets its prior from what was, with the error seen for such priors.
        """
        known = self.find(question)
        if known is None:
            return self._from_specification(question, strict=strict)
        beyond = known.range.outside(question)
        if not beyond:
            return known.constants
        why = f"beyond the measurements of {known.key}: {'; '.join(beyond)}"
        if strict:
            raise ConfigInvalid(
                "an extrapolation was refused", why=why, todo="measure there, or allow extrapolation", param="strict"
            )
        source = f"{known.constants.source}, extrapolated ({why})"
        spread = self._wider(known.constants.spread, known.range.doublings_beyond(question))
        return dataclasses.replace(known.constants, calibrated=False, source=source, spread=spread)

    def _wider(self, spread: Mapping[str, float], doublings: float) -> dict[str, float]:
        """Spread beyond the measurements: at least doubled in logarithms, and growing with the distance until, at
        `UNKNOWN_DOUBLINGS`, the error of predictions from specification alone has come on top. A rule of caution:
        nothing was measured there."""
        share = min(1.0, doublings / UNKNOWN_DOUBLINGS)
        wider = {}
        for name, ratio in spread.items():
            unknown = self.specification_spread.get(name, DEFAULT_SPREAD)
            wider[name] = ratio * max(ratio, unknown**share)
        return wider

    def find(self, question: Question) -> GroupFit | None:
        """The group that was measured for this, or None."""
        wanted = subject_of(question.accelerator, question.model, question.layout, question.framework or "").key
        same = [
            each
            for each in self.fits
            if each.key._replace(framework="") == wanted._replace(framework="")
            and question.framework in (None, each.key.framework)
        ]
        return max(same, key=lambda each: (each.points, each.key), default=None)

    def _from_specification(self, question: Question, *, strict: bool) -> Constants:
        framework = question.framework if question.framework is not None else self._usual_framework(question)
        subject = subject_of(question.accelerator, question.model, question.layout, framework)
        if strict:
            raise ConfigInvalid(
                f"{subject.key} was never measured", todo="measure it, or allow predictions from specification"
            )
        known = {each.key: theta_of(each.constants) for each in self.fits}
        facts = {each.key: each.subject for each in self.fits}
        prior = prior_for(subject, known, facts)
        spread = {name: self.specification_spread.get(name, DEFAULT_SPREAD) for name in QUANTITIES}
        source = f"from specification, with the habits of {len(known)} measured groups ({self.source})"
        return constants_of(prior.middle, source=source, calibrated=False, spread=spread)

    def _usual_framework(self, question: Question) -> str:
        """The one measured most for that model on that vendor's accelerators, else for that model, else overall."""

        def weight(each: GroupFit) -> tuple[bool, bool, int, str]:
            vendor = each.subject.accelerator.vendor == question.accelerator.vendor
            return each.key.model == question.model.name, vendor, each.points, each.key.framework

        best = max(self.fits, key=weight, default=None)
        return best.key.framework if best else ""
