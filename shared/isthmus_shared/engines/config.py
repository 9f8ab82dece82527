"""What an engine is made from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

MIB = 1024 * 1024


class EngineKind(StrEnum):
    REFERENCE = "reference"
    SIM = "sim"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class SimCosts:
    """A step's time: the sum of what it does, seconds. The defaults are an 8B model on one recent accelerator."""

    prefill_base_s: float = 0.004
    prefill_token_s: float = 40e-6
    decode_base_s: float = 0.006
    decode_sequence_s: float = 30e-6
    decode_resident_token_s: float = 50e-9
    """Per token of KV that the decoding sequences read."""

    def step_s(self, *, prefill_tokens: int, decode_sequences: int, resident_tokens: int) -> float:
        prefill = self.prefill_base_s + prefill_tokens * self.prefill_token_s if prefill_tokens else 0.0
        if not decode_sequences:
            return prefill
        decode = self.decode_base_s + decode_sequences * self.decode_sequence_s
        return prefill + decode + resident_tokens * self.decode_resident_token_s


class SimConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    costs: SimCosts = SimCosts()
    eos_chance: float = Field(default=0.0, ge=0, le=1)
    """Chance, by hash, that a token is end-of-sequence."""
    max_model_len_tokens: int = Field(default=32768, gt=1)


class EngineConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: EngineKind
    model_path: Path | None = None
    """A Hugging Face folder; needed by `reference` and `vllm`, for which it may also be a Hugging Face name."""
    model_name: str = Field(min_length=1)
    """The name under which it is served."""
    kv_layout: str = "nhd:16:fp32"
    kv_blocks: int | None = Field(default=None, gt=0)
    kv_cache_bytes: int = Field(default=128 * MIB, gt=0)
    """Size of the cache when `kv_blocks` is not given; the default holds 40,000 tokens of the tiny checkpoint."""
    max_batch: int = Field(default=32, gt=0)
    prefill_chunk_tokens: int = Field(default=256, gt=0)
    max_waiting: int = Field(default=512, gt=0)
    prefix_cache: bool = True
    """Whether blocks are kept for later prompts with the same beginning."""
    device: str = "cpu"
    """Of torch, for `reference`: where weights and cache are, and where it computes."""
    threads: int = Field(default=1, gt=0)
    """Of torch, in this process."""
    max_model_len_tokens: int | None = Field(default=None, gt=1)
    """Lower than the model's own, if given."""
    sim: SimConfig = SimConfig()
    vllm_args: str = ""
    """Arguments of vLLM's engine; see `engines.vllm.arguments`."""
