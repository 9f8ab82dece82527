"""The canonical KV form of an engine in one line, to be compared for equality before a pair is chosen."""

from __future__ import annotations

from isthmus_shared.kv.manifest import KvManifest


def kv_form(manifest: KvManifest) -> str:
    """Dtype and every group's shape, without the token range: ``fp32 full[0,2]x2x16 sliding:64[1,3]x2x16``."""
    groups = (
        f"{group.kind.value}{'' if group.window_tokens is None else f':{group.window_tokens}'}"
        f"[{','.join(map(str, group.layer_ids))}]x{group.kv_heads}x{group.head_dim}"
        for group in manifest.groups
    )
    return " ".join((manifest.dtype.value, *groups))
