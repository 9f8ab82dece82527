"""From vLLM's KV-cache configuration to the shape that transfers are described with. Knows vLLM by attribute only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.kv.manifest import KvDtype
from isthmus_shared.kv.shape import GroupShape, KvShape

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_DTYPES = {"torch.float32": KvDtype.FP32, "torch.float16": KvDtype.FP16, "torch.bfloat16": KvDtype.BF16}
ATTENTION = ("FullAttentionSpec", "SlidingWindowSpec")


def layer_id(name: str) -> int:
    """7 for ``model.layers.7.self_attn.attn``. Raises `ConfigInvalid` for a name that no transformer layer has."""
    found = _LAYER.findall(name)
    if len(found) != 1:
        _refuse(f"cache layer {name!r}", "its name does not say which layer of the model it is")
    return int(found[0])


def layer_specs(kv_cache_config: Any) -> dict[str, Any]:
    """The spec of each cache layer, by vLLM's name for it."""
    found: dict[str, Any] = {}
    for group in kv_cache_config.kv_cache_groups:
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            found[name] = group.kv_cache_spec if inner is None else inner[name]
    return found


def kv_shape(kv_cache_config: Any, *, fingerprint: str) -> KvShape:
    """Groups of equal layers, in order of their first layer, as the reference engine makes them.

    vLLM may split equal layers over several of its own groups, for their blocks' sake; here they are one.
    Raises `ConfigInvalid` for a kind of cache that is not carried (Mamba states, cross attention, quantised caches).
    """
    return shape_of(layer_specs(kv_cache_config), fingerprint=fingerprint)


def shape_of(specs: Mapping[str, Any], *, fingerprint: str) -> KvShape:
    by_layer = {layer_id(name): spec for name, spec in specs.items()}
    if len(by_layer) != len(specs):
        _refuse("the model", "two of its cache layers belong to one layer")
    members: dict[tuple[int | None, int, int], list[int]] = {}
    for layer in sorted(by_layer):
        members.setdefault(_key(by_layer[layer]), []).append(layer)
    groups = tuple(GroupShape(tuple(ids), heads, dim, window) for (window, heads, dim), ids in members.items())
    return KvShape(model_fingerprint=fingerprint, dtype=_one_dtype(by_layer.values()), groups=groups)


def _key(spec: Any) -> tuple[int | None, int, int]:
    kind = type(spec).__name__
    if kind not in ATTENTION:
        _refuse(kind, f"only {' and '.join(ATTENTION)} are carried between workers")
    window = getattr(spec, "sliding_window", None)
    return window, spec.num_kv_heads, spec.head_size


def _one_dtype(specs: Iterable[Any]) -> KvDtype:
    names = {str(spec.dtype) for spec in specs}
    if len(names) != 1 or not names <= _DTYPES.keys():
        _refuse(f"a KV cache of {', '.join(sorted(names))}", f"only {', '.join(_DTYPES)} are carried")
    return _DTYPES[names.pop()]


def _refuse(what: str, why: str) -> NoReturn:
    raise ConfigInvalid(f"vLLM: {what}", why=why, todo="serve it aggregated, on one worker", param="kind")
