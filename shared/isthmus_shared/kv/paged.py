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
        # A token's elements lie together in runs: one for NHD, one per head for HND, one per x of them when packed.
        self._token_elements = kv_heads * head_dim
        self._v_runs = 1 if layout.order is HeadOrder.NHD else kv_heads
        self._k_runs = self._v_runs if layout.packed_k is None else self._token_elements // layout.packed_k
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
        for cache, runs, values in ((self.k[layer], self._k_runs, k), (self.v[layer], self._v_runs, v)):
            rows = values.to(self.dtype).reshape(-1, self._token_elements // runs)
            cache.view(-1, rows.shape[-1]).index_copy_(0, self._rows(slots, runs), rows)

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Contiguous copies (k, v) of `slots` [...]: each [..., kv_heads, head_dim] in the cache's dtype."""
        shape = (*slots.shape, self.kv_heads, self.head_dim)
        k, v = (
            cache.view(-1, self._token_elements // runs).index_select(0, self._rows(slots, runs)).view(shape)
            for cache, runs in ((self.k[layer], self._k_runs), (self.v[layer], self._v_runs))
        )
        return k, v

    def _rows(self, slots: Tensor, runs: int) -> Tensor:
        """Where the runs of those tokens lie, in units of a run: int64 [tokens · runs], token by token.

        In a block, run r of all its tokens lies before run r + 1 of all its tokens.
        """
        if runs == 1:
            return slots.reshape(-1)
        size = self.layout.block_tokens
        first = slots // size * (size * runs) + slots % size
        return (first.reshape(-1, 1) + torch.arange(runs) * size).view(-1)
