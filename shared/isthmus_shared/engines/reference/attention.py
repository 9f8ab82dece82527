"""Grouped-query attention over keys gathered from the paged cache, with windows and attention sinks."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus_shared.engines.reference.plan import ROW_ALIGN, TILE

QUERY_BLOCK = 64
"""Queries whose scores are held at once: 64 by 4,096 keys and 8 heads in fp32 are 8 MiB, which a cache still holds."""


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, sinks: Tensor | None) -> Tensor:
    """softmax(q · k / √d) · v for each sequence.

    q [sequences, queries, heads, d] fp32; k, v [sequences, keys, kv heads, d] fp32, keys a multiple of TILE;
    hidden [sequences, queries, keys] bool; sinks [heads] or None. Returns [sequences, queries, heads · d].
    """
    q = q * q.shape[-1] ** -0.5
    keys = k.permute(0, 2, 3, 1).contiguous()
    values = v.transpose(1, 2).contiguous()
    blocks = []
    for start in range(0, q.shape[1], QUERY_BLOCK):
        part = slice(start, start + QUERY_BLOCK)
        mask = hidden[:, part]
        used = _used_tiles(mask) if q.shape[0] == 1 else slice(0, keys.shape[-1])
        blocks.append(_block(q[:, part], keys[..., used], values[:, :, used], mask[..., used], sinks))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def _used_tiles(mask: Tensor) -> slice:
    """Leaves out leading and trailing tiles that no query of the block sees; they would only add zeros."""
    seen = torch.nonzero(~mask.all(dim=(0, 1)).view(-1, TILE).all(dim=-1)).view(-1)
    return slice(int(seen[0]) * TILE, (int(seen[-1]) + 1) * TILE)


def _block(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
    """q [s, n, heads, d], keys [s, kv heads, d, t], values [s, kv heads, t, d], mask [s, n, t]."""
    count, queries, heads, dim = q.shape
    kv_heads, total = keys.shape[1], keys.shape[-1]
    group = heads // kv_heads
    padded = group if queries % ROW_ALIGN == 0 else group + -group % ROW_ALIGN
    grouped = q.new_zeros(count, kv_heads, padded, queries, dim)
    grouped[:, :, :group] = q.view(count, queries, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    rows = padded * queries
    scores = torch.matmul(grouped.view(count, kv_heads, rows, dim), keys).view(count, kv_heads, padded, queries, total)
    scores.masked_fill_(mask[:, None, None], float("-inf"))
    peak = scores.amax(dim=-1, keepdim=True)
    sink = None
    if sinks is not None:
        sink = q.new_zeros(kv_heads, padded, 1, 1)
        sink[:, :group, 0, 0] = sinks.view(kv_heads, group)
        peak = torch.maximum(peak, sink)
    weights = scores.sub_(peak).exp_().view(count, kv_heads, rows, total)
    output, mass = _weigh(weights, values)
    if sink is not None:
        mass = mass + (sink - peak).exp_().reshape(mass.shape)
    output = (output / mass).view(count, kv_heads, padded, queries, dim)[:, :, :group]
    return output.permute(0, 3, 1, 2, 4).reshape(count, queries, heads * dim)


def _weigh(weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Σ weight · value and Σ weight, tile after tile in order, so that tiles of zeros change nothing."""
    output = torch.matmul(weights[..., :TILE], values[..., :TILE, :])
    mass = weights[..., :TILE].sum(dim=-1, keepdim=True)
    for start in range(TILE, weights.shape[-1], TILE):
        tile = slice(start, start + TILE)
        output += torch.matmul(weights[..., tile], values[..., tile, :])
        mass += weights[..., tile].sum(dim=-1, keepdim=True)
    return output, mass
