"""May two workers exchange KV? Compared before a byte is sent; a refusal names the field and both values."""

from __future__ import annotations

from isthmus_shared.errors import ManifestMismatch
from isthmus_shared.kv.manifest import KvGroup, KvManifest

_GROUP_FIELDS = ("kind", "layer_ids", "kv_heads", "head_dim", "window_tokens", "token_start", "token_end")


def require_exchangeable(ours: KvManifest, theirs: KvManifest) -> None:
    """Raises `ManifestMismatch` for the first field in which the two differ. Both are for the same prompt."""
    for field in ("model_fingerprint", "dtype", "prompt_tokens"):
        _require_equal(field, getattr(ours, field), getattr(theirs, field))
    _require_equal("number of groups", len(ours.groups), len(theirs.groups))
    for index, (own, other) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
        for field in _GROUP_FIELDS:
            _require_equal(f"groups.{index}.{field}", getattr(own, field), getattr(other, field))


def kv_form(manifest: KvManifest) -> str:
    """A string that is equal for two workers exactly if their manifests for any one prompt are exchangeable."""
    groups = ";".join(_group_form(group) for group in manifest.groups)
    return f"{manifest.dtype}/{manifest.model_fingerprint}/{groups}"


def _group_form(group: KvGroup) -> str:
    window = "" if group.window_tokens is None else f"w{group.window_tokens}"
    layers = ",".join(str(layer) for layer in group.layer_ids)
    return f"{group.kind}{window}[{layers}]h{group.kv_heads}d{group.head_dim}"


def _require_equal(field: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise ManifestMismatch(
            f"KV manifests differ in {field}",
            why=f"here {ours!s}, there {theirs!s}",
            todo="let only workers with the same model and KV dtype exchange KV",
            param=field,
        )
