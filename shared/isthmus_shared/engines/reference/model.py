"""The decoder-only transformer: RMSNorm, rotary embedding, grouped-query attention over paged KV, SwiGLU."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from isthmus_shared.engines.reference.attention import attend
from isthmus_shared.engines.reference.model_config import ModelConfig, RopeConfig
from isthmus_shared.engines.reference.plan import ROW_ALIGN, StepPlan
from isthmus_shared.engines.reference.weights import LayerWeights, ModelWeights
from isthmus_shared.kv.paged import PagedKv


class ReferenceModel:
    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config, self._weights = config, weights
        self._frequencies = rope_frequencies(config.rope, config.head_dim)

    def forward(self, plan: StepPlan, kv: PagedKv, after_layer: Callable[[int], None]) -> Tensor:
        """Writes the rows' K and V into `kv`; calls `after_layer(i)` as soon as layer i's are there.

        Returns logits [sampled rows, vocabulary], fp32.
        """
        weights = self._weights
        angles = plan.positions.to(torch.float64)[:, None] * self._frequencies
        cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
        x = weights.embedding[plan.tokens]
        for index, layer in enumerate(weights.layers):
            x = x + self._attention(index, layer, self._norm(x, layer.input_norm), plan, kv, cos, sin)
            after_layer(index)
            x = x + _mlp(layer, self._norm(x, layer.post_norm))
        wanted = len(plan.sampled)
        if wanted == 0:
            return x.new_zeros(0, self.config.vocab_size)
        last = functional.pad(x[plan.sampled], (0, 0, 0, -wanted % ROW_ALIGN))
        return weights.head(self._norm(last, weights.final_norm))[:wanted]

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, plan: StepPlan, kv: PagedKv, cos: Tensor, sin: Tensor
    ) -> Tensor:
        config = self.config
        heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
        q, k, v = torch.split(layer.qkv(x).view(len(x), -1, dim), [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        kv.scatter(index, plan.slots, k[: plan.rows], v[: plan.rows])
        output = x.new_zeros(len(x), heads * dim)
        for group in plan.groups:
            view = group.views[config.windows[index]]
            keys, values = kv.gather(index, view.slots)
            queries = q[group.rows].view(group.sequences, group.queries, heads, dim)
            attended = attend(queries, keys.float(), values.float(), view.hidden, layer.sinks)
            output[group.rows] = attended.view(-1, heads * dim)
        return layer.o(output)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.config.norm_eps) * weight


def _mlp(layer: LayerWeights, x: Tensor) -> Tensor:
    gate, up = layer.gate_up(x).chunk(2, dim=-1)
    return layer.down(functional.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split form; x [rows, heads, d], cos and sin [rows, 1, d / 2]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position, fp64 [head_dim / 2], after scaling."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = rope.theta**-exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind != "llama3":
        return frequencies
    # Llama 3.1: long waves are stretched by `factor`, short ones kept, those between blended linearly in
    # (original context / wavelength).
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return frequencies * blend + frequencies / rope.factor * (1 - blend)
