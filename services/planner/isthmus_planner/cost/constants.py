"""The few constants that turn data sheets into times, and where they come from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from isthmus_shared.errors import ConfigInvalid

DEFAULT_SPREAD = 2.0
"""p90 over p50 where no measurement says better."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Effective constants of one accelerator, model and engine. η_w, η_kv, σ and skew are collinear: judge the sum."""

    layer_s: float = 100e-6
    """τ_L: launch and latency of one layer's decode step."""
    weight_efficiency: float = 0.8
    """η_w: of memory bandwidth, reading weights."""
    kv_efficiency: float = 0.6
    """η_kv: of memory bandwidth, reading KV."""
    sequence_s: float = 10e-6
    """σ: what one more sequence adds to a step, whatever its context."""
    skew: float = 0.6
    """s: how much a further token of a batch widens the choice of experts; 1: routing independent and uniform."""
    prefill_efficiency: float = 0.25
    """η_p: of the peak of the arithmetic format."""
    prefill_base_s: float = 0.03
    """t0: of every prefill, whatever its length."""
    prefill_token_s: float = 3e-6
    """rep: of one prompt token, however many accelerators share the work."""
    interference: float = 1.0
    """Of a prefill's time (t0 apart) that every sequence decoding on the same accelerators waits."""
    admission_steps: float = 1.5
    """Decode steps that pass before an engine takes a waiting prompt up."""
    run_share: float = 0.98
    """Of a benchmark's duration in which all its clients are busy; the rest is its start and its end. Judges measured
    throughput only: predictions are of the steady state."""
    source: str = "defaults"
    calibrated: bool = False
    spread: Mapping[str, float] = field(default_factory=dict)
    """Per quantity (`itl`, `tpot`, `ttft`, `e2el`, `throughput`): p90 over p50 of measurement over prediction."""

    def __post_init__(self) -> None:
        for name in NUMBERS:
            value = getattr(self, name)
            positive = name.endswith("efficiency") or name == "run_share"
            if not (math.isfinite(value) and (value > 0 if positive else value >= 0)):
                raise ConfigInvalid(
                    f"constant {name} = {value:g}", todo="give a positive number" if positive else "it is 0 or more"
                )

    def spread_of(self, quantity: str) -> float:
        """p90 over p50. An engine that streams several tokens a message shows no `itl`: its `tpot` stands for it."""
        known = self.spread.get(quantity)
        if known is None and quantity == "itl":
            known = self.spread.get("tpot")
        return DEFAULT_SPREAD if known is None else known


NUMBERS = tuple(f.name for f in fields(Constants) if f.type == "float")
