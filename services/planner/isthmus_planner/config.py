"""The planner's settings, ``ISTHMUS_PLANNER_*``."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from pydantic import Field, field_validator

from isthmus_planner.admission.control import AdmissionSettings
from isthmus_planner.cost.speeds import CostConstants
from isthmus_planner.deadlines import DeadlinePolicy
from isthmus_planner.prefix.index import MAX_HASHES
from isthmus_planner.roles.balance import BalancePolicy
from isthmus_planner.roles.loop import RoleSettings
from isthmus_planner.roles.models import ModelPolicy
from isthmus_planner.routing.policy import ModePolicy, Policy
from isthmus_planner.routing.settings import RoutingConfig


class LeaderPolicy(StrEnum):
    LEASE = "lease"
    SOLE = "sole"
    NEVER = "never"


_COST = CostConstants()
_DEADLINE = DeadlinePolicy()
_BALANCE = BalancePolicy()
_ADMISSION = AdmissionSettings()
_MODELS = ModelPolicy()


class PlannerConfig(RoutingConfig):
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
    prefix_hashes: int = Field(
        default=MAX_HASHES,
        gt=0,
        le=10**9,
        description="Cached prefixes remembered, over all workers; each takes 120 bytes",
    )

    leader: LeaderPolicy = Field(
        default=LeaderPolicy.LEASE,
        description="May assign roles and rates: by a lease in JetStream, always (only ever one planner), never",
    )
    lease_replicas: int = Field(
        default=1, ge=1, le=5, description="Servers of a NATS cluster that keep the lease; 3 outlive the loss of one"
    )
    plan_valid_s: float = Field(
        default=30.0, gt=0, le=3600, description="How long ingresses may route by its last plan when no planner answers"
    )
    balance_roles: bool = Field(default=True, description="Assign roles by load, to the workers that can take either")
    itl_target_s: float = Field(
        default=0.0,
        ge=0,
        le=60,
        description="Latency between tokens that roles and lanes are planned for, where requests promise none; 0: none",
    )
    role_hold_s: float = Field(
        default=_BALANCE.hold_s, ge=0, le=3600, description="Another division must be the better one for so long"
    )
    role_dwell_s: float = Field(
        default=_BALANCE.dwell_s,
        ge=0,
        le=86_400,
        description="A worker keeps its role, and a model the direction of its changes, for so long at least",
    )

    model_hold_s: float = Field(
        default=_MODELS.hold_s, ge=0, le=86_400, description="A model must need another worker for so long"
    )
    model_dwell_s: float = Field(
        default=_MODELS.dwell_s, ge=0, le=86_400, description="A worker keeps its model for so long at least"
    )

    def role_settings(self) -> RoleSettings:
        return RoleSettings(
            balance=self.balance_roles,
            itl_s=self.itl_target_s or None,
            policy=BalancePolicy(hold_s=self.role_hold_s, dwell_s=self.role_dwell_s),
            models=ModelPolicy(hold_s=self.model_hold_s, dwell_s=self.model_dwell_s),
        )

    max_wait_s: float = Field(
        default=_ADMISSION.max_wait_s,
        ge=0,
        le=60,
        description="In line at most, of requests whose class sets no time to the first token",
    )
    tenant_weights: tuple[str, ...] = Field(
        default=(), description="Shares of the line between tenants, as `name=weight`; 1 for those that are not named"
    )

    @field_validator("tenant_weights")
    @classmethod
    def _weights(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for each in given:
            _weight(each)
        return given

    def admission(self) -> AdmissionSettings:
        return AdmissionSettings(max_wait_s=self.max_wait_s, weights=dict(map(_weight, self.tenant_weights)))

    def policy(self) -> Policy:
        return Policy(
            mode=self.mode,
            constants=CostConstants(prefill_tokens_per_s=self.prefill_tokens_per_s, decode_step_s=self.decode_step_s),
            deadlines=DeadlinePolicy(
                ttft_floor_s=self.ttft_floor_s,
                transfer_floor_s=self.transfer_floor_s,
                stall_floor_s=self.stall_floor_s,
            ),
            weights=self.weights(),
            prices=self.price_of(),
            expected_osl_tokens=self.expected_osl_tokens,
            slo_margin=self.slo_margin,
        )


def _weight(given: str) -> tuple[str, float]:
    name, _, text = given.rpartition("=")
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not name or not 0 < weight < float("inf"):
        raise ValueError(f"{given!r} is no name=weight with a weight above 0")
    return name, weight
