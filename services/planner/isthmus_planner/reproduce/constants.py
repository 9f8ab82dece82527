"""`data/constants.yaml`, checked: what is known from elsewhere, what was assumed, what was fitted to these figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from isthmus_planner.cost.constants import Constants
from isthmus_planner.reproduce.published import packaged


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Decode(_Part):
    source: str
    layer_s: float = Field(gt=0)
    weight_efficiency: float = Field(gt=0)
    kv_efficiency: float = Field(gt=0)
    sequence_s: float = Field(ge=0)
    skew: float = Field(ge=0)
    prefill_base_s: float = Field(ge=0)
    prefill_token_s: float = Field(default=0.0, ge=0)

    def constants(self, prefill_efficiency: float) -> Constants:
        return Constants(
            layer_s=self.layer_s,
            weight_efficiency=self.weight_efficiency,
            kv_efficiency=self.kv_efficiency,
            sequence_s=self.sequence_s,
            skew=self.skew,
            prefill_efficiency=prefill_efficiency,
            prefill_base_s=self.prefill_base_s,
            prefill_token_s=self.prefill_token_s,
            source=self.source,
        )


class CrossKnown(_Decode):
    prefill_efficiency: dict[str, float]


class DeepSeekKnown(_Decode):
    prefill_efficiency: float = Field(gt=0)


class _CrossFittedFile(_Part):
    figures: str
    cross_intake_bytes_per_s: float = Field(gt=0)
    single_intake_bytes_per_s: float = Field(gt=0)
    resident_step_s_per_token: float = Field(ge=0)
    resident_above_tokens: float = Field(ge=0)
    resident_receive_s_per_pair: float = Field(ge=0)
    cross_stall_s_per_token: float = Field(ge=0)


class _CrossFile(_Part):
    known: CrossKnown
    fitted: _CrossFittedFile


class Assumed(_Part):
    """A workload that was not published; plausible, and stated."""

    isl_tokens: int = Field(ge=1)
    osl_tokens: int = Field(ge=2)
    clients_per_server: int = Field(ge=1)
    scale_up_as: str
    why: str


class DeepSeekFitted(_Part):
    figures: str
    interference: float = Field(ge=0)


class DeepSeekConstants(_Part):
    known: DeepSeekKnown
    assumed: Assumed
    fitted: DeepSeekFitted


class _File(_Part):
    cross_vendor: _CrossFile
    deepseek: DeepSeekConstants


@dataclass(frozen=True, slots=True)
class CrossFitted:
    """The six that were fitted. Each belongs to a mechanism that can be switched off."""

    cross_intake_bytes_per_s: float
    """KV that the decode node takes in, from the other vendor's prefill."""
    single_intake_bytes_per_s: float
    """The same from its own vendor's."""
    resident_step_s_per_token: float
    """Single-vendor decode: each step, per resident KV token above the next."""
    resident_above_tokens: float
    resident_receive_s_per_pair: float
    """Single-vendor decode: per token received and token held above the same."""
    cross_stall_s_per_token: float
    """Cross-vendor: decode stands still so long for each token of a prompt that joins."""

    def without(self, mechanism: str) -> CrossFitted:
        """With one mechanism off. KeyError for a name that MECHANISMS does not have."""
        return dataclasses.replace(self, **MECHANISMS[mechanism])


MECHANISMS: Mapping[str, Mapping[str, float]] = {
    "kv_intake": {"cross_intake_bytes_per_s": math.inf, "single_intake_bytes_per_s": math.inf},
    "resident_kv_step": {"resident_step_s_per_token": 0.0},
    "resident_kv_receive": {"resident_receive_s_per_pair": 0.0},
    "transfer_stall": {"cross_stall_s_per_token": 0.0},
}
"""By name: the values with which it does nothing."""


@dataclass(frozen=True, slots=True)
class ReproduceConstants:
    cross_known: CrossKnown
    cross_fitted: CrossFitted
    cross_figures: str
    deepseek: DeepSeekConstants


def constants() -> ReproduceConstants:
    file = _File.model_validate(packaged("constants.yaml"))
    fitted = file.cross_vendor.fitted
    values = fitted.model_dump(exclude={"figures"})
    return ReproduceConstants(file.cross_vendor.known, CrossFitted(**values), fitted.figures, file.deepseek)
