"""A paged KV cache in any `KvLayout`, read and written token by token as a model does; in bulk through its views.

Tokens are addressed by slot = block · block_tokens + offset in the block. All indexing is vectorised.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus_shared.kv.blocks import fits
from isthmus_shared.kv.layout import KvLayout
from isthmus_shared.kv.manifest import KvDtype
from isthmus_shared.kv.views import LayerViews, views_of

TORCH_DTYPES: dict[KvDtype, torch.dtype] = {
    KvDtype.FP32: torch.float32,
    KvDtype.FP16: torch.float16,
    KvDtype.BF16: torch.bfloat16,
    KvDtype.FP8_E4M3FN: torch.float8_e4m3fn,
    KvDtype.FP8_E4M3FNUZ: torch.float8_e4m3fnuz,
}
FP8_LARGEST = {KvDtype.FP8_E4M3FN: 448.0, KvDtype.FP8_E4M3FNUZ: 224.0}
"""Larger values are cut to this code. fnuz has a ±240 too, which fn has nothing for; vLLM leaves it out as well."""


class PagedKv:
    """K and V of every layer, zero at first. Not thread-safe: the owner serialises steps."""

    def __init__(self, layout: KvLayout, *, layers: int, kv_heads: int, head_dim: int, blocks: int) -> None:
        self.layout = layout
        self.kv_heads, self.head_dim, self.blocks = kv_heads, head_dim, blocks
        self.dtype = TORCH_DTYPES[layout.dtype]
        shapes = layout.tensor_shapes(blocks, kv_heads, head_dim)
        self.tensors = [tuple(torch.zeros(shape, dtype=self.dtype) for shape in shapes) for _ in range(layers)]
        """Of each layer: one tensor that holds K and V, or K's and V's."""
        self.views = [self._views(tensors) for tensors in self.tensors]
        """Of each layer, in the cache's dtype, for gather and scatter of whole spans."""
        self._parts = [tuple(self._indexable(part) for part in views.parts) for views in self.views]

    def _views(self, tensors: tuple[Tensor, ...]) -> LayerViews:
        raw = tensors[0] if len(tensors) == 1 else (tensors[0], tensors[1])
        sizes = {"block_tokens": self.layout.block_tokens, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return views_of(raw, self.layout.form, run=self.layout.run, **sizes)

    def slots(self, block_table: Sequence[int], token_start: int, token_end: int) -> Tensor:
        """Slots (int64, [tokens]) of a sequence's tokens `token_start … token_end − 1`."""
        positions = torch.arange(token_start, token_end)
        table = torch.tensor(block_table, dtype=torch.int64)
        size = self.layout.block_tokens
        return table[positions // size] * size + positions % size

    def scatter(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [tokens, kv_heads, head_dim] (any float dtype; rounded to the cache's) to `slots` [tokens]."""
        for part, values in zip(self._parts[layer], (k, v), strict=True):
            rows = self._encode(values)
            part[self._places(part, slots)] = rows.view(part.dtype).view(len(rows), *part.shape[3:])

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Contiguous copies (k, v) of `slots` [...]: each [..., kv_heads, head_dim], in fp32 if the cache is FP8, else
        in the cache's dtype."""
        shape = (*slots.shape, self.kv_heads, self.head_dim)
        k, v = (self._decode(part[self._places(part, slots)], shape) for part in self._parts[layer])
        return k, v

    def _indexable(self, part: Tensor) -> Tensor:
        """The same memory in elements that indexing moves quickest: the widest that lie in one piece, else bytes."""
        inner = part.squeeze(5)
        if inner.stride(-1) == 1 and fits(inner, 8):
            wide = inner.view(torch.int64)
            return wide if part.shape[5] > 1 else wide.unsqueeze(5)
        return part.view(torch.uint8) if self.layout.dtype.is_fp8 else part

    def _encode(self, values: Tensor) -> Tensor:
        """[tokens, row elements] in the cache's dtype."""
        rows = values.reshape(len(values), self.kv_heads * self.head_dim)
        if not self.layout.dtype.is_fp8:
            return rows.to(self.dtype)
        largest = FP8_LARGEST[self.layout.dtype]
        return (rows.float() / self.layout.fp8_scale).clamp(-largest, largest).to(self.dtype)

    def _decode(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        rows = rows.flatten(-3).view(self.dtype).view(shape)
        return rows.float() * self.layout.fp8_scale if self.layout.dtype.is_fp8 else rows

    def _places(self, part: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size, run = self.layout.block_tokens, part.shape[2]
        within = slots % size
        return slots // size, within // run, within % run
