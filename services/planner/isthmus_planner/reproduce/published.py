"""`data/published.yaml`, checked."""

from __future__ import annotations

from importlib import resources
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

Order = Literal["parity", "cross", "clearly_cross", "single", "growing"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Lengths(_Part):
    isl_tokens: int = Field(ge=1)
    osl_tokens: int = Field(ge=1)
    concurrency: tuple[int, ...] = Field(min_length=1)


class Claim(_Part):
    """One published statement: an ordering, a ratio or a bound."""

    scenario: str
    says: str
    concurrency: tuple[int, ...] = Field(min_length=1)
    order: Order | None = None
    e2el_ratio: float | None = None
    tps_ratio: float | None = None
    cross_tps_above: float | None = None
    single_tps_below: float | None = None


class CrossVendor(_Part):
    title: str
    source: str
    url: str
    model: str
    tp: int
    network_bit_per_s: float
    rate_per_s: float
    prefill: dict[Literal["cross", "single"], str]
    decode: str
    scenarios: dict[str, Lengths]
    claims: tuple[Claim, ...]
    e2el_geometric_mean: float
    tps_geometric_mean: float


class OutputRates(_Part):
    fast_alone: float
    slow_alone: float
    balanced: float
    disaggregated: float


class DeepSeek(_Part):
    title: str
    source: str
    url: str
    model: str
    tp: int
    fast: str
    slow: str
    slow_servers: int
    output_tokens_per_s: OutputRates


class Published(_Part):
    cross_vendor: CrossVendor
    deepseek: DeepSeek


def published() -> Published:
    return Published.model_validate(packaged("published.yaml"))


def packaged(name: str) -> Any:
    text = resources.files("isthmus_planner.reproduce").joinpath("data", name).read_text(encoding="utf-8")
    return yaml.safe_load(text)
