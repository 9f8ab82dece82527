"""What a planner weighs, and how much. Every score is in seconds of somebody's waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from isthmus_planner.cost.speeds import CostConstants
from isthmus_planner.deadlines import DeadlinePolicy


class ModePolicy(StrEnum):
    DISAGGREGATED = "disaggregated"
    """Wherever a pair is feasible; aggregated otherwise."""
    AGGREGATED = "aggregated"
    AUTO = "auto"
    """Whichever is predicted to be cheaper."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one second of each kind. All 1: the route that adds least to the waiting of all clients together."""

    itl: float = 1.0
    """Of the request's own decoding: its tokens times their latency."""
    residents: float = 1.0
    """Of the time that those already on a worker lose by its prefill or by one more in their batch."""
    transfer: float = 1.0
    """Of the crossing: the second token waits for it."""
    dollar_s: float = 10.0
    """Seconds that one dollar is worth: a worker of $10 an hour costs 0.03 s a second; decides between near equals."""
    missed_s: float = 30.0
    """For each request that misses a target by this route: above any latency that anybody would wait out, so that
    targets come first."""
    excess: float = 10.0
    """Of each second beyond a target, so that of two that miss it the nearer one is better."""
    room_s: float = 1.0
    """For a worker that has no room for the KV now: it waits until a sequence there ends."""
    load_s: float = 1e-5
    """For each sequence on a worker: decides between equals, and nothing else."""


@dataclass(frozen=True, slots=True)
class Policy:
    mode: ModePolicy = ModePolicy.DISAGGREGATED
    constants: CostConstants = field(default_factory=CostConstants)
    deadlines: DeadlinePolicy = field(default_factory=DeadlinePolicy)
    weights: Weights = field(default_factory=Weights)
    prices: Mapping[str, float] = field(default_factory=dict)
    """Dollars an hour, by worker id, else by the worker's vendor label; unnamed ones cost nothing."""
    expected_osl_tokens: float = 256.0
    """Tokens of an answer, until outcomes have told of some; never more than the request's maximum."""
    slo_margin: float = 1.1
    """A target counts as met when so many times the prediction is within it: half of all are later than their p50."""
