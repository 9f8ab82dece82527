"""What one flow of KV holds, told to the other side before a byte is sent.

The canonical form on the wire is one dense byte string: layer group → layer → K, then V → token → KV head → head
dim, in the manifest's dtype, little-endian. A group's tokens are `token_start … token_end − 1` of the prompt: a
sliding-window group carries only what a later token can still see.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator


class KvDtype(StrEnum):
    """Element type of cached keys and values; the FP8 flavour is part of it."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def itemsize_bytes(self) -> int:
        return 4 if self is KvDtype.FP32 else 2


class GroupKind(StrEnum):
    FULL = "full"
    SLIDING = "sliding"


class KvGroup(BaseModel):
    """Layers that share one shape and one token range."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: GroupKind
    layer_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    window_tokens: int | None = Field(default=None, gt=0)
    token_start: int = Field(ge=0)
    token_end: int = Field(gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> KvGroup:
        if self.token_end <= self.token_start:
            raise ValueError(f"token_end {self.token_end} must be greater than token_start {self.token_start}")
        if (self.kind is GroupKind.SLIDING) != (self.window_tokens is not None):
            raise ValueError("window_tokens is given for a sliding group, and only for one")
        return self

    @property
    def tokens(self) -> int:
        return self.token_end - self.token_start

    @property
    def row_elements(self) -> int:
        """Elements of one token's K (or V) in one layer."""
        return self.kv_heads * self.head_dim


class KvManifest(BaseModel):
    """One flow's contents. Two workers may exchange KV only if their manifests agree (see `kv.negotiate`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_fingerprint: str
    dtype: KvDtype
    prompt_tokens: int = Field(gt=0)
    groups: tuple[KvGroup, ...] = Field(min_length=1)

    @property
    def total_bytes(self) -> int:
        return sum(2 * len(g.layer_ids) * g.tokens * g.row_elements for g in self.groups) * self.dtype.itemsize_bytes
