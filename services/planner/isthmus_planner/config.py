"""The planner's settings, ``ISTHMUS_PLANNER_*``."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from isthmus_planner.cost.speeds import CostConstants
from isthmus_planner.deadlines import DeadlinePolicy
from isthmus_planner.routing.policy import ModePolicy, Policy
from isthmus_shared.config import ServiceConfig

_COST = CostConstants()
_DEADLINE = DeadlinePolicy()


class PlannerConfig(ServiceConfig):
    PREFIX: ClassVar[str] = "PLANNER"

    mode: ModePolicy = Field(
        default=ModePolicy.DISAGGREGATED, description="Disaggregate where a pair is feasible, never, or by cost"
    )
    ttft_floor_s: float = Field(default=_DEADLINE.ttft_floor_s, gt=0, le=600, description="Least time to a first token")
    transfer_floor_s: float = Field(
        default=_DEADLINE.transfer_floor_s,
        gt=0,
        le=600,
        description="Least time for the crossing, after the first token",
    )
    stall_floor_s: float = Field(
        default=_DEADLINE.stall_floor_s, gt=0, le=600, description="Least silence that ends an attempt"
    )
    prefill_tokens_per_s: float = Field(
        default=_COST.prefill_tokens_per_s, gt=0, description="Assumed until a worker has reported its own"
    )
    decode_step_s: float = Field(
        default=_COST.decode_step_s, gt=0, description="Assumed until a worker has reported its own"
    )

    def policy(self) -> Policy:
        return Policy(
            mode=self.mode,
            constants=CostConstants(prefill_tokens_per_s=self.prefill_tokens_per_s, decode_step_s=self.decode_step_s),
            deadlines=DeadlinePolicy(
                ttft_floor_s=self.ttft_floor_s,
                transfer_floor_s=self.transfer_floor_s,
                stall_floor_s=self.stall_floor_s,
            ),
        )
