"""What other accelerators say about one that was not (or hardly) measured: a prior for its constants. Pure.

Each constant's logarithm is a sum of small effects (vendor, engine, model, precision, accelerator) around a common
middle, found by ridge regression over the groups that were measured. An effect that no group shows is zero, so a new
accelerator gets its vendor's, its engine's and its model's habits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from isthmus_planner.cost.calibration.fitting import fit
from isthmus_planner.cost.calibration.groups import Array, Group, GroupKey, Subject
from isthmus_planner.cost.calibration.parameters import DEVIATION, HIGH, LOW, NAMES, START, Prior

RIDGE = 0.3
"""How strongly effects are drawn to zero: as by a third of a group that shows none."""
RIDGE_MIDDLE = 0.05
SPEED_EXPONENT = 0.7
"""Of bandwidth, by which times fall from one generation to the next: seen from H100, H200, MI300X to B200, MI355X."""
REFERENCE_BYTES_PER_S = 5e12
SHRINK = 0.3
"""The prior from other groups against the vague one: how much narrower it is."""
ROUNDS = 2
"""Of fitting each group with what the others say; later rounds change no error by a tenth of a percent."""

Fits: TypeAlias = Mapping[GroupKey, Array]
"""Logarithms of constants, in the order of `fitting.PARAMETERS`."""
Facts: TypeAlias = Mapping[GroupKey, Subject]


def prior_for(subject: Subject, fits: Fits, facts: Facts) -> Prior:
    """From all fits but the subject's own; a vague one, adjusted for bandwidth, if there are none."""
    others = [key for key in fits if key != subject.key]
    if not others:
        return Prior(np.clip(_expected(subject), LOW, HIGH), DEVIATION)
    levels = _levels([facts[key] for key in others])
    rows = np.array([_features(facts[key], levels) for key in others])
    targets = np.array([fits[key] - _expected(facts[key]) for key in others])
    penalty = np.diag([RIDGE_MIDDLE] + [RIDGE] * len(levels))
    effects = np.linalg.solve(rows.T @ rows + penalty, rows.T @ targets)
    middle = _expected(subject) + np.array(_features(subject, levels)) @ effects
    return Prior(np.clip(middle, LOW, HIGH), DEVIATION * SHRINK)


def fit_all(groups: Mapping[GroupKey, Group], known: Fits, facts: Facts) -> dict[GroupKey, Array]:
    """Every group fitted with what the others, and fits `known` from elsewhere, say. `facts` describes those."""
    subjects = {**facts, **{key: group.subject for key, group in groups.items()}}
    fits = {key: fit(group, prior_for(group.subject, {}, subjects)) for key, group in groups.items()}
    for _ in range(ROUNDS):
        for key, group in groups.items():
            fits[key] = fit(group, prior_for(group.subject, {**known, **fits}, subjects), start=fits[key])
    return fits


def _expected(subject: Subject) -> Array:
    """Before any measurement: constants that are times shrink as accelerators grow faster, the others do not."""
    bandwidth = subject.accelerator.need("memory_bytes_per_s", "a prior")
    faster = SPEED_EXPONENT * np.log(bandwidth / REFERENCE_BYTES_PER_S)
    is_time = np.array([name.endswith("_s") for name in NAMES], dtype=np.float64)
    return np.asarray(START - faster * is_time, dtype=np.float64)


def _levels(subjects: Sequence[Subject]) -> list[str]:
    return sorted({tag for subject in subjects for tag in _tags(subject)})


def _features(subject: Subject, levels: Sequence[str]) -> list[float]:
    tags = _tags(subject)
    return [1.0, *(1.0 if level in tags else 0.0 for level in levels)]


def _tags(subject: Subject) -> set[str]:
    narrowed = subject.key.precision != subject.model.precision
    tags = {
        f"accelerator {subject.key.accelerator}",
        f"vendor {subject.accelerator.vendor}",
        f"engine {subject.key.framework}",
        f"model {subject.key.model}",
    }
    if narrowed:
        tags.add(f"requantized to {subject.key.precision}")
    if subject.key.dp_attention:
        tags.add("dp attention")
    if subject.key.expert_parallel:
        tags.add("expert parallel")
    return tags
