"""The physical form in which a worker keeps its KV cache. Torch-free: only shapes and names.

A layout is written ``<order>:<block tokens>:<dtype>[:packed<x>]``: ``nhd:16:fp32`` is [block, token, head, dim] in
blocks of 16 tokens, as CUDA builds commonly keep it; ``hnd:64:fp32:packed4`` has the head before the token, and
splits K's head dim into runs of x elements that lie together for neighbouring tokens, as ROCm kernels like it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.kv.manifest import KvDtype

MAX_BLOCK_TOKENS = 4096
"""Larger than any vendor's block; a typing error beyond it would make one block eat the whole pool."""
_FORM = "<nhd|hnd>:<block tokens>:<fp32|fp16|bf16>[:packed<x>]"


class HeadOrder(StrEnum):
    """Which of token (N) and head (H) is the outer dimension inside a block."""

    NHD = "nhd"
    HND = "hnd"


@dataclass(frozen=True, slots=True)
class KvLayout:
    block_tokens: int
    order: HeadOrder
    dtype: KvDtype
    packed_k: int | None = None
    """x: K is [blocks, heads, head_dim / x, block_tokens, x]. V stays [blocks, heads, block_tokens, head_dim]."""

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS:
            raise _refuse(str(self), f"a block has 1 to {MAX_BLOCK_TOKENS} tokens, not {self.block_tokens}")
        if self.packed_k is not None and self.packed_k < 1:
            raise _refuse(str(self), f"packed{self.packed_k} is not a positive run length")
        if self.packed_k is not None and self.order is not HeadOrder.HND:
            raise _refuse(str(self), "packed K exists only with the order hnd")

    @classmethod
    def parse(cls, text: str) -> KvLayout:
        """The layout that `text` names, or `ConfigInvalid`."""
        parts = text.strip().lower().split(":")
        if not 3 <= len(parts) <= 4:
            raise _refuse(text, f"it has {len(parts)} parts separated by ':'")
        if parts[0] not in set(HeadOrder):
            raise _refuse(text, f"the order is nhd or hnd, not {parts[0]!r}")
        if parts[2] not in set(KvDtype):
            raise _refuse(text, f"the dtype is one of {', '.join(KvDtype)}, not {parts[2]!r}")
        packed = None
        if len(parts) == 4:
            if not parts[3].startswith("packed"):
                raise _refuse(text, f"the last part is packed<x>, not {parts[3]!r}")
            packed = _number(parts[3].removeprefix("packed"), text)
        return cls(_number(parts[1], text), HeadOrder(parts[0]), KvDtype(parts[2]), packed)

    def __str__(self) -> str:
        packed = "" if self.packed_k is None else f":packed{self.packed_k}"
        return f"{self.order}:{self.block_tokens}:{self.dtype}{packed}"

    def describe(self) -> str:
        """For people: ``NHD, block 16, fp32``."""
        packed = "" if self.packed_k is None else f", K packed by {self.packed_k}"
        return f"{self.order.upper()}, block {self.block_tokens}, {self.dtype}{packed}"

    def k_shape(self, blocks: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's K. Raises `ConfigInvalid` when x does not divide the head dim."""
        if self.packed_k is None:
            return self.v_shape(blocks, kv_heads, head_dim)
        if head_dim % self.packed_k:
            raise _refuse(str(self), f"the model's head_dim {head_dim} is not a multiple of {self.packed_k}")
        return (blocks, kv_heads, head_dim // self.packed_k, self.block_tokens, self.packed_k)

    def v_shape(self, blocks: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        if self.order is HeadOrder.NHD:
            return (blocks, self.block_tokens, kv_heads, head_dim)
        return (blocks, kv_heads, self.block_tokens, head_dim)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)


def _number(text: str, whole: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise _refuse(whole, f"{text!r} is not a whole number")
    return int(text)


def _refuse(text: str, why: str) -> ConfigInvalid:
    return ConfigInvalid(f"KV layout {text!r}", why=why, todo=f"write it as {_FORM}", param="kv_layout")
