"""A predicted quantity with its uncertainty and its origin."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_planner.cost.constants import Constants


@dataclass(frozen=True, slots=True)
class Prediction:
    """`p90` is the value that nine in ten measurements of such a configuration stay on the good side of.

    It is above `p50` for a latency and below it for a throughput: the spread is the model's own error, taken from
    measurements that it was not fitted to, not the spread between the requests of one run.
    """

    p50: float
    p90: float
    calibrated: bool
    """Whether the constants were fitted to measurements of this very pair of accelerator and model."""
    source: str

    @staticmethod
    def latency(p50: float, constants: Constants, quantity: str) -> Prediction:
        ratio = constants.spread_of(quantity)
        return Prediction(p50, p50 * ratio, constants.calibrated, constants.source)

    @staticmethod
    def throughput(p50: float, constants: Constants, quantity: str = "throughput") -> Prediction:
        ratio = constants.spread_of(quantity)
        return Prediction(p50, p50 / ratio, constants.calibrated, constants.source)
