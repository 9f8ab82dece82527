"""One group's constants from its measurements and a prior: bounded, robust least squares in logarithms. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.optimize import least_squares

from isthmus_planner.cost.calibration.groups import Array, Group
from isthmus_planner.cost.calibration.parameters import HIGH, LOW, Prior, constants_of

NOISE = 0.03
"""Relative scatter of measurements around any smooth law, seen between runs and neighbouring configurations."""
OUTLIER = 2.0
"""In units of that scatter: beyond it a residual counts linearly, not by its square (Huber)."""
WEIGHTS: Mapping[str, float] = {"itl": 1.5, "tpot": 1.0, "e2el": 1.0, "ttft": 0.15, "throughput": 0.5}
"""TTFT scatters by several times as much as the rest; throughput says what latency says once more."""
MAX_EVALUATIONS = 60
"""Of the model's Jacobian; fits settle within twenty."""


def fit(group: Group, prior: Prior, start: Array | None = None) -> Array:
    """The most believable constants, as logarithms. A group without rows gives the prior's middle."""
    middle = np.clip(prior.middle, LOW + 1e-6, HIGH - 1e-6)
    if not len(group):
        return middle
    observed = {name: np.log(values) for name, values in group.observed.items()}

    def residuals(theta: Array) -> Array:
        predicted = group.predict(constants_of(theta))
        parts = [
            _huber((np.log(predicted[name]) - observed[name])[np.isfinite(observed[name])] * weight / NOISE)
            for name, weight in WEIGHTS.items()
        ]
        parts.append((theta - prior.middle) / prior.deviation)
        return np.concatenate(parts)

    begin = middle if start is None else np.clip(start, LOW + 1e-6, HIGH - 1e-6)
    found = least_squares(residuals, begin, bounds=(LOW, HIGH), max_nfev=MAX_EVALUATIONS, xtol=1e-5, ftol=1e-6)
    return np.asarray(found.x, dtype=np.float64)


def _huber(residual: Array) -> Array:
    """Square roots of Huber's loss, signed: their squares grow linearly beyond `OUTLIER`."""
    size = np.abs(residual)
    beyond = np.sign(residual) * np.sqrt(np.maximum(2 * OUTLIER * size - OUTLIER**2, 0.0))
    return np.where(size <= OUTLIER, residual, beyond)
