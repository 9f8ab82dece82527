"""Bytes of KV: what is stored, what a decode step reads, what crosses. Pure arithmetic on a profile."""

from __future__ import annotations

from isthmus_planner.cost.layout import Layout
from isthmus_planner.cost.profiles import ModelProfile


def layer_bytes_per_token(model: ModelProfile, layout: Layout) -> float:
    """One layer's KV of one token, a single copy: keys and values of all KV heads, or one latent and rotary key."""
    if model.mla is not None:
        return (model.mla.latent_dim + model.mla.rope_dim) * layout.kv_element_bytes
    return 2 * model.kv_heads * model.head_dim * layout.kv_element_bytes


def full_bytes_per_token(model: ModelProfile, layout: Layout) -> float:
    """Grows with context: the layers that see all of it. What one more token adds to every later step's reading."""
    return model.full_layers * layer_bytes_per_token(model, layout)


def stored_bytes_per_token(model: ModelProfile, layout: Layout) -> float:
    """All layers, as an engine stores them that keeps windowed layers whole."""
    return model.layers * layer_bytes_per_token(model, layout)


def window_bytes_per_sequence(model: ModelProfile, layout: Layout) -> float:
    """Read per step for windowed layers once the context is past the window."""
    return model.window_layers * model.window_tokens * layer_bytes_per_token(model, layout)


def prompt_bytes(model: ModelProfile, layout: Layout, tokens: float) -> float:
    """What a prompt's KV weighs on the wire: full layers whole, windowed layers trimmed to the window."""
    window = model.window_layers * min(tokens, model.window_tokens) * layer_bytes_per_token(model, layout)
    return full_bytes_per_token(model, layout) * tokens + window


def shard(model: ModelProfile, layout: Layout) -> int:
    """Over how many ranks of a group one copy of KV is divided: a latent cannot be, nor one head."""
    return 1 if model.mla is not None else min(layout.tp, model.kv_heads)


def copies(model: ModelProfile, layout: Layout) -> float:
    """How often a group stores each KV element: replicated where there are more ranks than KV heads."""
    return layout.tp / shard(model, layout)
