"""config.json of a Hugging Face folder, as far as this engine computes it; anything else is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from isthmus_shared.errors import ConfigInvalid

TINY = "isthmus_tiny"
MODEL_TYPES = ("llama", "qwen2", "qwen3", TINY)
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """One per layer: tokens that it sees, its own included; None is all."""
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sinks: bool
    """A learned logit per head to which attention may go instead of a token (the gpt-oss form)."""
    eos_token_ids: frozenset[int]

    @property
    def layers(self) -> int:
        return len(self.windows)


def read_model_config(folder: Path) -> ModelConfig:
    """Raises `ConfigInvalid` naming the key that is missing or not supported."""
    fields = _read_json(folder / "config.json")
    model_type = fields.get("model_type")
    if model_type not in MODEL_TYPES:
        _refuse("model_type", model_type, f"this engine computes {', '.join(MODEL_TYPES)}")
    if fields.get("hidden_act", "silu") != "silu":
        _refuse("hidden_act", fields["hidden_act"], "only silu (SwiGLU) is computed")
    heads, hidden = _positive(fields, "num_attention_heads"), _positive(fields, "hidden_size")
    kv_heads = _positive(fields, "num_key_value_heads", heads)
    if heads % kv_heads:
        _refuse("num_key_value_heads", kv_heads, f"it must divide num_attention_heads, {heads}")
    bias = bool(fields.get("attention_bias", False))
    return ModelConfig(
        model_type=model_type,
        hidden=hidden,
        intermediate=_positive(fields, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(fields, hidden, heads),
        vocab_size=_positive(fields, "vocab_size"),
        max_position=_positive(fields, "max_position_embeddings"),
        norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope=_rope(fields),
        windows=_windows(fields, _positive(fields, "num_hidden_layers")),
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=bias or model_type == "qwen2",
        o_bias=bias,
        mlp_bias=bool(fields.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        sinks=model_type == TINY,
        eos_token_ids=_eos(folder, fields),
    )


def eos_token_ids(folder: Path) -> frozenset[int]:
    """Tokens that end an output, of any model in Hugging Face form: generation_config.json's, else config.json's."""
    return _eos(folder, _read_json(folder / "config.json"))


def _head_dim(fields: dict[str, Any], hidden: int, heads: int) -> int:
    if fields.get("head_dim") is None:
        if hidden % heads:
            _refuse("hidden_size", hidden, f"without head_dim it must be a multiple of {heads} heads")
        return hidden // heads
    dim = _positive(fields, "head_dim")
    if dim % 2:
        _refuse("head_dim", dim, "rotary embedding needs an even one")
    return dim


def _windows(fields: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    sliding = fields.get("sliding_window")
    kinds = fields.get("layer_types")
    if kinds is None:
        if sliding is not None and fields.get("use_sliding_window", True):
            _refuse("sliding_window", sliding, "without layer_types it is not clear which layers slide")
        return (None,) * layers
    if len(kinds) != layers:
        _refuse("layer_types", len(kinds), f"there are {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            _refuse("layer_types", kind, "a layer is full_attention or sliding_attention")
    if "sliding_attention" in kinds:
        window = _positive(fields, "sliding_window")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return (None,) * layers


def _rope(fields: dict[str, Any]) -> RopeConfig:
    """`rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (5)."""
    scaling: dict[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or fields.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        _refuse("rope_scaling", kind, f"this engine computes {', '.join(ROPE_TYPES)}")
    if kind == "default":
        return RopeConfig(theta)
    needed = ("factor",) if kind == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    for key in needed:
        if not isinstance(scaling.get(key), int | float) or scaling[key] <= 0:
            _refuse(f"rope_scaling.{key}", scaling.get(key), f"{kind} scaling needs a positive number")
    if kind == "linear":
        return RopeConfig(theta, kind, float(scaling["factor"]))
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_max_position=_positive(scaling, "original_max_position_embeddings"),
    )


def _eos(folder: Path, fields: dict[str, Any]) -> frozenset[int]:
    generation = folder / "generation_config.json"
    named = _read_json(generation).get("eos_token_id") if generation.exists() else None
    value = fields.get("eos_token_id") if named is None else named
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and item >= 0 for item in ids):
        _refuse("eos_token_id", value, "it is a token id or a list of them")
    return frozenset(ids)


def _positive(fields: dict[str, Any], key: str, default: int | None = None) -> int:
    value = fields.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or value < 1:
        _refuse(key, value, "a positive whole number is needed")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"model file {path} cannot be read", why=str(error), param="model_path") from error
    if not isinstance(fields, dict):
        raise ConfigInvalid(f"model file {path} is not a JSON object", param="model_path")
    return fields


def _refuse(key: str, value: object, why: str) -> NoReturn:
    raise ConfigInvalid(f"config.json: {key} is {value!r}", why=why, param="model_path")
