"""A paged KV cache in any `KvLayout`, and the way between it and canonical [tokens, kv heads, head dim] tensors.

Tokens are addressed by slot = block · block_tokens + offset in the block. All indexing is vectorised; conversions
between layouts happen here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus_shared.kv.layout import HeadOrder, KvLayout
from isthmus_shared.kv.manifest import KvDtype

TORCH_DTYPES: dict[KvDtype, torch.dtype] = {
    KvDtype.FP32: torch.float32,
    KvDtype.FP16: torch.float16,
    KvDtype.BF16: torch.bfloat16,
}


class PagedKv:
    """K and V tensors of every layer, zero at first. Not thread-safe: the owner serialises steps."""

    def __init__(self, layout: KvLayout, *, layers: int, kv_heads: int, head_dim: int, blocks: int) -> None:
        self.layout = layout
        self.kv_heads, self.head_dim, self.blocks = kv_heads, head_dim, blocks
        self.dtype = TORCH_DTYPES[layout.dtype]
        k_shape, v_shape = layout.k_shape(blocks, kv_heads, head_dim), layout.v_shape(blocks, kv_heads, head_dim)
        self.k = [torch.zeros(k_shape, dtype=self.dtype) for _ in range(layers)]
        self.v = [torch.zeros(v_shape, dtype=self.dtype) for _ in range(layers)]

    def slots(self, block_table: Sequence[int], token_start: int, token_end: int) -> Tensor:
        """Slots (int64, [tokens]) of a sequence's tokens `token_start … token_end − 1`."""
        positions = torch.arange(token_start, token_end)
        table = torch.tensor(block_table, dtype=torch.int64)
        size = self.layout.block_tokens
        return table[positions // size] * size + positions % size

    def scatter(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [tokens, kv_heads, head_dim] (any float dtype; rounded to the cache's) to `slots` [tokens]."""
        k, v = k.to(self.dtype), v.to(self.dtype)
        if self.layout.order is HeadOrder.NHD:
            self._flat(self.k[layer]).index_copy_(0, slots, k)
            self._flat(self.v[layer]).index_copy_(0, slots, v)
            return
        block, offset = slots // self.layout.block_tokens, slots % self.layout.block_tokens
        self.v[layer][block, :, offset] = v
        if self.layout.packed_k is None:
            self.k[layer][block, :, offset] = k
        else:
            self.k[layer][block, :, :, offset] = k.view(
                *k.shape[:-1], self.head_dim // self.layout.packed_k, self.layout.packed_k
            )

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Contiguous copies (k, v) of `slots` [...]: each [..., kv_heads, head_dim] in the cache's dtype."""
        if self.layout.order is HeadOrder.NHD:
            index = slots.reshape(-1)
            shape = (*slots.shape, self.kv_heads, self.head_dim)
            k = self._flat(self.k[layer]).index_select(0, index).view(shape)
            return k, self._flat(self.v[layer]).index_select(0, index).view(shape)
        block, offset = slots // self.layout.block_tokens, slots % self.layout.block_tokens
        v = self.v[layer][block, :, offset]
        if self.layout.packed_k is None:
            return self.k[layer][block, :, offset].contiguous(), v.contiguous()
        return self.k[layer][block, :, :, offset].flatten(-2).contiguous(), v.contiguous()

    @staticmethod
    def _flat(tensor: Tensor) -> Tensor:
        return tensor.view(-1, *tensor.shape[2:])
