"""May two workers exchange KV? Compared before a byte is sent; a refusal names the field, both values and the way out.

Block sizes and layouts are no matter: the wire is canonical. The two FP8 flavours are no matter either: the same bits
mean half as much in e4m3fnuz, so a scale there is twice the other's (see `kv.fp8`).
"""

from __future__ import annotations

import hashlib

from isthmus_shared.errors import ManifestMismatch
from isthmus_shared.kv.manifest import FORM_VERSION, KvDtype, KvGroup, KvManifest, ScaleKind

_GROUP_FIELDS = (
    "kind",
    "layer_ids",
    "kv_heads",
    "head_start",
    "model_heads",
    "head_dim",
    "window_tokens",
    "token_start",
    "token_end",
)
_SAME_MODEL = "serve the same checkpoint on both sides"
_TODO = {
    "version": "run one release of Isthmus on both sides",
    "model_fingerprint": _SAME_MODEL,
    "prompt_tokens": "send both sides the same token ids",
    "window_tokens": "let both engines use the model's own window",
    "token_start": "send both sides the same token ids",
    "token_end": "send both sides the same token ids",
    "head_start": "serve the same checkpoint on both sides, and ask for the heads that the flow carries",
    "kv_heads": "serve the same checkpoint on both sides, and ask for the heads that the flow carries",
    "dtype": "set one KV cache dtype on both sides; only the two FP8 flavours are converted",
    "scales": "load both sides' KV scales from one checkpoint; e4m3fnuz has them doubled",
    "scales.kind": "compute KV scales in one way on both sides",
    "scales.block_tokens": "let the consumer's scales cover as many tokens as the producer's, or a divisor of it",
}


def require_exchangeable(ours: KvManifest, theirs: KvManifest) -> None:
    """Raises `ManifestMismatch` for the first field in which the two differ. Both are for the same prompt.

    `ours` is what this side would write or read, `theirs` comes with the flow.
    """
    if max(ours.version, theirs.version) > FORM_VERSION:
        raise _mismatch("version", f"up to {FORM_VERSION}", max(ours.version, theirs.version))
    for field in ("model_fingerprint", "prompt_tokens"):
        _require_equal(field, getattr(ours, field), getattr(theirs, field))
    _require_equal("number of groups", len(ours.groups), len(theirs.groups))
    for index, (own, other) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
        for field in _GROUP_FIELDS:
            _require_equal(f"groups.{index}.{field}", getattr(own, field), getattr(other, field))
        _require_dtype(index, ours, theirs, own, other)


def _require_dtype(index: int, ours: KvManifest, theirs: KvManifest, own: KvGroup, other: KvGroup) -> None:
    here, there = ours.dtype_of(own), theirs.dtype_of(other)
    if not (here.is_fp8 and there.is_fp8):
        field = "dtype" if own.dtype is None and other.dtype is None else f"groups.{index}.dtype"
        return _require_equal(field, here, there)
    if _granule(own) and _granule(other):
        if _granule(other) % _granule(own):
            raise _mismatch(f"groups.{index}.scales.block_tokens", _granule(own), _granule(other))
        return None
    if _granule(own) or _granule(other):
        raise _mismatch(f"groups.{index}.scales.kind", _kind(own), _kind(other))
    mine, yours = _fn_scales(own, here), _fn_scales(other, there)
    if mine != yours:
        at = next(at for at, (one, two) in enumerate(zip(mine, yours, strict=True)) if one != two)
        unit = f"{here} {_as_given(mine[at], here)}", f"{there} {_as_given(yours[at], there)}"
        raise _mismatch(f"groups.{index}.scales", *unit)
    return None


def kv_form(manifest: KvManifest) -> str:
    """Two workers whose strings are equal may exchange KV of any prompt.

    The other way round it holds but for FP8 scales per block: there a consumer with smaller blocks could take them too.
    """
    groups = ";".join(_group_form(manifest, group) for group in manifest.groups)
    return f"{_dtype_form(manifest.dtype)}/{manifest.model_fingerprint}/{groups}"


def _group_form(manifest: KvManifest, group: KvGroup) -> str:
    window = "" if group.window_tokens is None else f"w{group.window_tokens}"
    layers = ",".join(str(layer) for layer in group.layer_ids)
    shard = "" if group.kv_heads == group.model_heads else f"@{group.head_start}/{group.model_heads}"
    dtype = manifest.dtype_of(group)
    own = "" if _dtype_form(dtype) == _dtype_form(manifest.dtype) else f":{_dtype_form(dtype)}"
    return f"{group.kind}{window}[{layers}]h{group.kv_heads}{shard}d{group.head_dim}{own}{_scales_form(group, dtype)}"


def _scales_form(group: KvGroup, dtype: KvDtype) -> str:
    if not dtype.is_fp8:
        return ""
    if _granule(group):
        return f"s{_granule(group)}"
    text = ",".join(scale.hex() for scale in _fn_scales(group, dtype))
    return f"s{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _dtype_form(dtype: KvDtype) -> str:
    return "fp8_e4m3" if dtype.is_fp8 else dtype.value


def _granule(group: KvGroup) -> int:
    return 0 if group.scales is None or group.scales.block_tokens is None else group.scales.block_tokens


def _kind(group: KvGroup) -> str:
    return "none" if group.scales is None else group.scales.kind.value


def _fn_scales(group: KvGroup, dtype: KvDtype) -> tuple[float, ...]:
    """Static scales as e4m3fn would have them, one for each (part, layer, head)."""
    count = group.parts * len(group.layer_ids)
    if group.scales is None:
        values: tuple[float, ...] = (1.0,) * (count * group.kv_heads)
    elif group.scales.kind is ScaleKind.HEAD:
        values = group.scales.k + group.scales.v
    else:
        values = tuple(value for value in group.scales.k + group.scales.v for _ in range(group.kv_heads))
    half = dtype is KvDtype.FP8_E4M3FNUZ
    return tuple(value / 2 if half else value for value in values)


def _as_given(scale: float, dtype: KvDtype) -> float:
    return scale * 2 if dtype is KvDtype.FP8_E4M3FNUZ else scale


def _require_equal(field: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise _mismatch(field, ours, theirs)


def _mismatch(field: str, ours: object, theirs: object) -> ManifestMismatch:
    last = field.rpartition(".")[2]
    nested = ".".join(field.split(".")[2:])
    return ManifestMismatch(
        f"KV manifests differ in {field}",
        why=f"here {ours!s}, there {theirs!s}",
        todo=_TODO.get(nested, _TODO.get(last, _SAME_MODEL)),
        param=field,
    )
