"""What one flow of KV holds, told to the other side before a byte is sent.

The canonical form on the wire is one dense byte string: layer group → layer → K, then V (or the latent alone) → token
→ KV head → head dim, in the group's dtype, little-endian. A group's tokens are `token_start … token_end − 1` of the
prompt: a sliding-window group carries only what a later token can still see. A group whose FP8 scales are per block
has after the rows of each part its scales, fp32 [blocks of scales, heads].
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

FORM_VERSION = 2
"""1: K and V of whole heads in fp32, fp16 and bf16. 2: latents, FP8 with scales, tensor-parallel shards."""
SCALE_BYTES = 4
"""fp32"""
Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class KvDtype(StrEnum):
    """Element type of cached keys and values; the FP8 flavour is part of it."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8_E4M3FN = "fp8_e4m3fn"
    FP8_E4M3FNUZ = "fp8_e4m3fnuz"

    @property
    def is_fp8(self) -> bool:
        return self in (KvDtype.FP8_E4M3FN, KvDtype.FP8_E4M3FNUZ)

    @property
    def itemsize_bytes(self) -> int:
        if self.is_fp8:
            return 1
        return 4 if self is KvDtype.FP32 else 2


class GroupKind(StrEnum):
    FULL = "full"
    SLIDING = "sliding"
    LATENT = "latent"
    """MLA: one compressed row a token instead of K and V, the same on every tensor-parallel rank."""


class ScaleKind(StrEnum):
    """What shares one FP8 scale: a layer's K (and its V), one head of it, or one head of a block of tokens."""

    TENSOR = "tensor"
    HEAD = "head"
    BLOCK = "block"


class KvScales(BaseModel):
    """FP8: value = code · scale. Per tensor and per head the scales stand here, per block they travel in the flow."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ScaleKind
    k: tuple[Scale, ...] = ()
    """[layers] or, layer by layer, [layers · heads of the group]; of a latent too."""
    v: tuple[Scale, ...] = ()
    block_tokens: int | None = Field(default=None, gt=0)
    """Tokens that share a scale, counted from token 0 of the prompt; given for `block` only."""

    @model_validator(mode="after")
    def _consistent(self) -> KvScales:
        per_block = self.kind is ScaleKind.BLOCK
        if per_block != (self.block_tokens is not None):
            raise ValueError("block_tokens is given for scales per block, and only for those")
        if per_block and (self.k or self.v):
            raise ValueError("scales per block travel in the flow, not in the manifest")
        return self


class KvGroup(BaseModel):
    """Layers that share one shape and one token range. Heads are those of this flow: one shard of the model's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: GroupKind
    layer_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    window_tokens: int | None = Field(default=None, gt=0)
    token_start: int = Field(ge=0)
    token_end: int = Field(gt=0)
    head_start: int = Field(default=0, ge=0)
    """The first of the model's KV heads that this flow carries."""
    heads_total: int | None = Field(default=None, gt=0)
    """KV heads of the model; None: this flow carries all of them."""
    dtype: KvDtype | None = None
    """None: the manifest's."""
    scales: KvScales | None = None
    """Of FP8 only; None: 1."""

    @model_validator(mode="after")
    def _consistent(self) -> KvGroup:
        if self.token_end <= self.token_start:
            raise ValueError(f"token_end {self.token_end} must be greater than token_start {self.token_start}")
        if (self.kind is GroupKind.SLIDING) != (self.window_tokens is not None):
            raise ValueError("window_tokens is given for a sliding group, and only for one")
        if self.kind is GroupKind.LATENT and (self.kv_heads, self.head_start, self.model_heads) != (1, 0, 1):
            raise ValueError("a latent has one head, and no shards")
        if self.head_start + self.kv_heads > self.model_heads:
            raise ValueError(f"heads {self.head_start} + {self.kv_heads} are more than the model's {self.model_heads}")
        _check_scales(self)
        return self

    @property
    def tokens(self) -> int:
        return self.token_end - self.token_start

    @property
    def parts(self) -> int:
        """K and V, or the latent."""
        return 1 if self.kind is GroupKind.LATENT else 2

    @property
    def model_heads(self) -> int:
        return self.kv_heads if self.heads_total is None else self.heads_total

    @property
    def row_elements(self) -> int:
        """Elements of one token's K (or V, or latent) in one layer."""
        return self.kv_heads * self.head_dim

    @property
    def scale_blocks(self) -> int:
        """Blocks of tokens with scales of their own that this flow touches; 0 if scales are not per block."""
        if self.scales is None or self.scales.block_tokens is None:
            return 0
        size = self.scales.block_tokens
        return -(-self.token_end // size) - self.token_start // size


class KvManifest(BaseModel):
    """One flow's contents. Two workers may exchange KV only if their manifests agree (see `kv.negotiate`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = Field(default=1, ge=1)
    """The lowest form version that can express it (`FORM_VERSION` is the highest known here)."""
    model_fingerprint: str
    dtype: KvDtype
    prompt_tokens: int = Field(gt=0)
    groups: tuple[KvGroup, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> KvManifest:
        seen: set[int] = set()
        for index, group in enumerate(self.groups):
            if group.scales is not None and not self.dtype_of(group).is_fp8:
                raise ValueError(f"group {index} has scales, but is of {self.dtype_of(group)}")
            if group.token_end > self.prompt_tokens:
                raise ValueError(f"group {index} ends at token {group.token_end} of {self.prompt_tokens}")
            if seen & set(group.layer_ids) or len(set(group.layer_ids)) != len(group.layer_ids):
                raise ValueError(f"layers of group {index} are in the manifest twice")
            seen |= set(group.layer_ids)
        if self.version < (needed := needed_version(self.dtype, self.groups)):
            raise ValueError(f"version {self.version} cannot express it; it needs {needed}")
        return self

    def dtype_of(self, group: KvGroup) -> KvDtype:
        return self.dtype if group.dtype is None else group.dtype

    def rows_bytes(self, group: KvGroup) -> int:
        """Bytes of the rows of one part of one layer."""
        return group.tokens * group.row_elements * self.dtype_of(group).itemsize_bytes

    def part_bytes(self, group: KvGroup) -> int:
        """The same with the scales behind them."""
        return self.rows_bytes(group) + group.scale_blocks * group.kv_heads * SCALE_BYTES

    @property
    def total_bytes(self) -> int:
        return sum(group.parts * len(group.layer_ids) * self.part_bytes(group) for group in self.groups)


def needed_version(dtype: KvDtype, groups: Iterable[KvGroup]) -> int:
    """The lowest form version that can express such a manifest."""
    newer = dtype.is_fp8 or any(
        group.kind is GroupKind.LATENT or group.heads_total is not None or group.dtype is not None for group in groups
    )
    return 2 if newer else 1


def _check_scales(group: KvGroup) -> None:
    if group.scales is None or group.scales.kind is ScaleKind.BLOCK:
        return
    count = len(group.layer_ids) * (group.kv_heads if group.scales.kind is ScaleKind.HEAD else 1)
    given = (len(group.scales.k), len(group.scales.v))
    if given != (count, count * (group.parts - 1)):
        raise ValueError(f"{given[0]} scales of K and {given[1]} of V, where {count} a part belong")
