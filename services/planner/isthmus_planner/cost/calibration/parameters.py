"""The constants that are fitted: bounds, where a fit begins, and beliefs about them. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from isthmus_planner.cost.calibration.groups import Array
from isthmus_planner.cost.constants import Constants


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    start: float
    """The prior's middle where nothing is known."""
    deviation: float
    """Of the prior, in natural logarithms: 1 is a factor of 2.7 either way."""
    low: float
    high: float


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("layer_s", 100e-6, 1.0, 5e-6, 2e-3),
    # Efficiencies are against the bytes that the profile counts: an engine that stores KV in one byte where two are
    # counted, or weights in fewer bits, shows more than 1.
    Parameter("weight_efficiency", 0.7, 0.5, 0.1, 1.4),
    Parameter("kv_efficiency", 0.6, 0.7, 0.05, 2.0),
    Parameter("sequence_s", 10e-6, 1.5, 1e-7, 1e-3),
    Parameter("skew", 0.6, 0.7, 0.05, 1.5),
    Parameter("prefill_efficiency", 0.2, 0.9, 0.005, 1.0),
    Parameter("prefill_base_s", 0.04, 1.2, 1e-4, 2.0),
    Parameter("prefill_token_s", 3e-6, 1.2, 1e-8, 5e-4),
    Parameter("interference", 1.0, 0.3, 0.2, 2.5),
    Parameter("admission_steps", 1.5, 1.2, 0.05, 60.0),
    Parameter("run_share", 0.978, 0.03, 0.9, 1.0),
)
NAMES = tuple(parameter.name for parameter in PARAMETERS)
LOW = np.log([parameter.low for parameter in PARAMETERS])
HIGH = np.log([parameter.high for parameter in PARAMETERS])
START = np.log([parameter.start for parameter in PARAMETERS])
DEVIATION = np.array([parameter.deviation for parameter in PARAMETERS])


@dataclass(frozen=True, slots=True)
class Prior:
    """Independent log-normal beliefs about the constants, in the order of `PARAMETERS`."""

    middle: Array
    deviation: Array


def constants_of(theta: Array, **more: object) -> Constants:
    values = dict(zip(NAMES, np.exp(theta).tolist(), strict=True))
    return dataclasses.replace(Constants(**values), **more)  # type: ignore[arg-type]


def theta_of(constants: Constants) -> Array:
    """Logarithms, within the bounds."""
    values = np.array([getattr(constants, name) for name in NAMES])
    return np.asarray(np.clip(np.log(np.maximum(values, 1e-12)), LOW, HIGH), dtype=np.float64)
