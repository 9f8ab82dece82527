"""A vLLM engine's cache groups as this project's KV shape: its objects are read by their fields."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from isthmus_kvrelay.client.vllm.scheduling import GroupTable
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.kv.manifest import KvDtype
from isthmus_shared.kv.reshard import heads_of
from isthmus_shared.kv.shape import GroupShape, KvShape

FULL_SPECS = frozenset({"FullAttentionSpec", "SinkFullAttentionSpec"})
WINDOW_SPECS = frozenset({"SlidingWindowSpec"})
LATENT_SPECS = frozenset({"MLAAttentionSpec"})
DTYPES = {"torch.float32": KvDtype.FP32, "torch.float16": KvDtype.FP16, "torch.bfloat16": KvDtype.BF16}
_INDEX = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer of one rank. `block_tokens` is what the scheduler's block tables count in."""

    name: str
    layer_id: int
    group: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: KvDtype
    window_tokens: int | None = None
    latent: bool = False


def read_layers(groups: Iterable[Any]) -> tuple[LayerSpec, ...]:
    """Layers of vLLM's `KVCacheGroupSpec`s. Raises `ConfigInvalid` for a cache that cannot be transferred."""
    found: dict[int, LayerSpec] = {}
    for index, group in enumerate(groups):
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            layer = _layer(name, index, group.kv_cache_spec.block_size, spec)
            if layer.layer_id in found:
                other = found[layer.layer_id].name
                raise _refuse(name, f"its number {layer.layer_id} is that of {other} too")
            found[layer.layer_id] = layer
    if not found:
        raise ConfigInvalid("the model has no KV cache", todo="run it without the connector", param="kv_connector")
    return tuple(found[layer_id] for layer_id in sorted(found))


def group_tables(groups: Iterable[Any]) -> tuple[GroupTable, ...]:
    """What the scheduler's core has to know of each cache group."""
    tables = []
    for group in groups:
        windows = {layer.window_tokens for layer in read_layers([group])}
        window = None if None in windows else max(window for window in windows if window is not None)
        tables.append(GroupTable(group.kv_cache_spec.block_size, window))
    return tuple(tables)


def kv_shape(layers: Iterable[LayerSpec], *, fingerprint: str, tp_size: int, kv_heads_total: int) -> KvShape:
    """The whole model's shape, from one rank's layers: heads of all ranks; groups in order of their first layer."""
    members: dict[tuple[object, ...], list[LayerSpec]] = {}
    layers = tuple(layers)
    for layer in layers:
        total = 1 if layer.latent else kv_heads_total
        own = heads_of(0, tp_size, total).count
        if own != layer.kv_heads:
            raise _refuse(layer.name, f"it has {layer.kv_heads} KV heads, of {total} on {tp_size} ranks each has {own}")
        members.setdefault((layer.window_tokens, layer.latent, layer.head_dim, total), []).append(layer)
    if len({layer.dtype for layer in layers}) > 1:
        raise _refuse(layers[0].name, "not all layers have its dtype")
    groups = tuple(
        GroupShape(
            layer_ids=tuple(layer.layer_id for layer in same),
            kv_heads=1 if same[0].latent else kv_heads_total,
            head_dim=same[0].head_dim,
            window_tokens=same[0].window_tokens,
            latent=same[0].latent,
        )
        for same in members.values()
    )
    return KvShape(model_fingerprint=fingerprint, dtype=layers[0].dtype, groups=groups)


def _layer(name: str, group: int, block_tokens: int, spec: Any) -> LayerSpec:
    kind = type(spec).__name__
    if kind not in FULL_SPECS | WINDOW_SPECS | LATENT_SPECS:
        raise _refuse(name, f"a cache of the kind {kind} is not supported")
    quantized = getattr(spec, "kv_quant_mode", None)
    if quantized is not None and getattr(quantized, "value", quantized):
        raise _refuse(name, f"a quantized cache ({quantized}) is not supported yet")
    dtype = DTYPES.get(str(spec.dtype))
    if dtype is None:
        raise _refuse(name, f"a cache of {spec.dtype} is not supported")
    latent = kind in LATENT_SPECS
    if not latent and spec.head_size_v not in (None, spec.head_size):
        raise _refuse(name, f"K has heads of {spec.head_size}, V of {spec.head_size_v}")
    return LayerSpec(
        name=name,
        layer_id=layer_number(name),
        group=group,
        block_tokens=block_tokens,
        kv_heads=1 if latent else spec.num_kv_heads,
        head_dim=spec.head_size,
        dtype=dtype,
        window_tokens=getattr(spec, "sliding_window", None),
        latent=latent,
    )


def layer_number(name: str) -> int:
    """``model.layers.3.self_attn.attn`` → 3. Raises `ConfigInvalid` unless there is exactly one number."""
    numbers = _INDEX.findall(name)
    if len(numbers) != 1:
        raise _refuse(name, f"there are {len(numbers)} numbers in its name, so its place in the model is unknown")
    return int(numbers[0])


def _refuse(name: str, why: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"the KV of layer {name} cannot be transferred",
        why=why,
        todo="run this model without the connector",
        param="kv_connector",
    )
