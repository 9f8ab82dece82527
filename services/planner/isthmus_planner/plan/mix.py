"""What is asked for, as the expectations that a closed form needs: over the mix, not of mean lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus_planner.plan.inputs import LengthSpec
from isthmus_planner.sim.workload import Lengths

POINTS = 65
"""Of a length's distribution; the error of a mean is far below a token."""


def lengths(spec: int | LengthSpec) -> Lengths:
    if isinstance(spec, int):
        return Lengths.constant(spec)
    if spec.low is not None and spec.high is not None:
        return Lengths.uniform(spec.low, spec.high)
    assert spec.mean is not None
    return Lengths.lognormal(float(spec.mean), spec.cv) if spec.cv > 0 else Lengths.constant(spec.mean)


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests whose two lengths are independent."""

    name: str
    share: float
    """Of all requests; the shares of a mix add up to 1."""
    isl: Lengths
    osl: Lengths

    @property
    def constant(self) -> bool:
        return self.isl.quantiles[0] == self.isl.most and self.osl.quantiles[0] == self.osl.most


@dataclass(frozen=True, slots=True)
class Mix:
    kinds: tuple[Kind, ...]
    prefix_hit_share: float = 0.0

    @property
    def isl_tokens(self) -> float:
        return sum(kind.share * kind.isl.mean for kind in self.kinds)

    @property
    def osl_tokens(self) -> float:
        return sum(kind.share * kind.osl.mean for kind in self.kinds)

    @property
    def steps(self) -> float:
        """Decode steps of a request: the first token comes from prefill. At least one, so that rates stay finite."""
        return max(1.0, self.osl_tokens - 1.0)

    @property
    def longest_tokens(self) -> int:
        return max(kind.isl.most + kind.osl.most for kind in self.kinds)

    def prompt_mean(self, function: Callable[[Any, Any], Any]) -> float:
        """E[f(new tokens, cached tokens)] over the prompts."""
        total = 0.0
        for kind in self.kinds:
            isl = _points(kind.isl)
            cached = np.floor(isl * self.prefix_hit_share)
            total += kind.share * float(np.mean(function(isl - cached, cached)))
        return total

    @property
    def context_tokens(self) -> float:
        """Of a sequence picked among those that decode: long answers are met more often."""
        return self._while_decoding(0.5)

    @property
    def held_tokens(self) -> float:
        """The same with all its output, for which room is held from the beginning."""
        return self._while_decoding(1.0)

    def _while_decoding(self, part: float) -> float:
        total = weight = 0.0
        for kind in self.kinds:
            osl = _points(kind.osl)
            first, second = float(np.mean(osl)), float(np.mean(osl * osl))
            total += kind.share * (first * kind.isl.mean + part * second)
            weight += kind.share * first
        return total / weight


def _points(lengths: Lengths) -> Any:
    """Tokens at the middles of equal parts of the distribution. float64 (POINTS) or (1)."""
    quantiles = np.asarray(lengths.quantiles, dtype=np.float64)
    if len(quantiles) == 1:
        return quantiles
    at = (np.arange(POINTS) + 0.5) / POINTS * (len(quantiles) - 1)
    return np.interp(at, np.arange(len(quantiles)), quantiles)
