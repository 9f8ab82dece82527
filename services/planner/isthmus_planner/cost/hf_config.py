"""A model profile from a Hugging Face `config.json`. Pure: takes the parsed mapping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isthmus_planner.cost.layout import Precision
from isthmus_planner.cost.profiles import Mla, ModelProfile, WeightBits
from isthmus_shared.errors import ConfigInvalid

MXFP4_BITS = 4.25
"""Four bits a weight and one byte of scale for 32 of them."""
NVFP4_BITS = 4.5
"""Four bits a weight and one byte of scale for 16 of them."""
SWIGLU_MATRICES = 3
"""Gate, up and down."""
BITS: Mapping[Precision, WeightBits] = {Precision.BF16: WeightBits(16, 16), Precision.FP8: WeightBits(8, 8)}
"""Scales of fp8 blocks are neglected. In fp4 a model with experts keeps the rest wider; 8 bits stand for the mix."""


class _Config:
    """Fields of one config.json, refused by name when they are missing or no count."""

    def __init__(self, name: str, fields: Mapping[str, Any]) -> None:
        self.name, self.fields = name, fields

    def count(self, *names: str, default: int | None = None) -> int:
        """The first of the names that is there; a positive integer, or 0 by default only."""
        for name in names:
            value = self.fields.get(name)
            if value is not None:
                if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                    raise ConfigInvalid(
                        f"config of {self.name!r} has {name} = {value!r}", todo="it is a count", param=name
                    )
                return value
        if default is None:
            raise ConfigInvalid(
                f"config of {self.name!r} has no {' or '.join(names)}",
                todo="write a model profile by hand (docs/cost-model.md)",
                param=names[0],
            )
        return default

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.fields.get(name, default)
        return bool(value)


def model_from_hf(name: str, fields: Mapping[str, Any]) -> ModelProfile:
    """Raises `ConfigInvalid` naming the field that is missing, or the kind of model that is not known."""
    config = _Config(name, fields)
    kind = fields.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise ConfigInvalid(f"config of {name!r} has model_type = {kind!r}", todo="it is a word", param="model_type")
    if kind is not None and kind in _KINDS:
        return _KINDS[kind](config)
    foreign = sorted(set(fields) & _UNKNOWN_STRUCTURE)
    if foreign:
        raise ConfigInvalid(
            f"config of {name!r} is of a kind that is not known",
            why=f"model_type {kind!r} has {', '.join(foreign)}, whose parameters cannot be counted",
            todo=f"write a model profile by hand; known kinds: {', '.join(sorted(_KINDS))}",
            param="model_type",
        )
    return _decoder(config)


_UNKNOWN_STRUCTURE = {
    "kv_lora_rank", "num_experts", "num_local_experts", "n_routed_experts", "ssm_state_size", "state_size",
    "layers_block_type", "hybrid_override_pattern", "linear_num_value_heads", "text_config",
    "encoder_layers", "num_encoder_layers", "is_encoder_decoder",
}  # fmt: skip
"""Fields of models that a plain decoder's arithmetic would count wrongly."""


def _decoder(config: _Config) -> ModelProfile:
    """Dense decoder with grouped-query attention and a gated feed-forward block: Llama, Qwen 3, Mistral and kin."""
    layers, hidden = config.count("num_hidden_layers"), config.count("hidden_size")
    ffn = SWIGLU_MATRICES * hidden * config.count("intermediate_size")
    return _finish(config, dense=layers * (_gqa_params(config) + ffn), experts=0, per_token=0, expert_params=0)


def _qwen3_moe(config: _Config) -> ModelProfile:
    layers, hidden = config.count("num_hidden_layers"), config.count("hidden_size")
    experts, per_token = config.count("num_experts"), config.count("num_experts_per_tok")
    dense_layers = len(config.fields.get("mlp_only_layers") or ())
    sparse = config.count("decoder_sparse_step", default=1)
    moe_layers = (layers - dense_layers) // max(sparse, 1)
    each = SWIGLU_MATRICES * hidden * config.count("moe_intermediate_size")
    ffn = (layers - moe_layers) * SWIGLU_MATRICES * hidden * config.count("intermediate_size", default=0)
    dense = layers * _gqa_params(config) + ffn + moe_layers * hidden * experts
    return _finish(config, dense, experts, per_token, moe_layers * experts * each)


def _gpt_oss(config: _Config) -> ModelProfile:
    layers, hidden = config.count("num_hidden_layers"), config.count("hidden_size")
    experts = config.count("num_local_experts", "num_experts")
    per_token = config.count("num_experts_per_tok", "experts_per_token")
    intermediate = config.count("intermediate_size")
    each = SWIGLU_MATRICES * hidden * intermediate + 2 * intermediate + hidden  # the expert's three biases with it
    dense = layers * (_gqa_params(config) + hidden * experts)
    return _finish(config, dense, experts, per_token, layers * experts * each, mxfp4_dense_bits=16)


def _deepseek_v3(config: _Config) -> ModelProfile:
    layers, hidden, heads = (config.count(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    latent, rope, nope = (config.count(key) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
    v_dim, q_latent = config.count("v_head_dim"), config.count("q_lora_rank", default=0)
    q_out = heads * (nope + rope)
    query = hidden * q_latent + q_latent * q_out if q_latent else hidden * q_out
    attention = query + hidden * (latent + rope) + latent * heads * (nope + v_dim) + heads * v_dim * hidden
    experts, per_token = config.count("n_routed_experts"), config.count("num_experts_per_tok")
    dense_layers = config.count("first_k_dense_replace", default=0)
    each = SWIGLU_MATRICES * hidden * config.count("moe_intermediate_size")
    shared = config.count("n_shared_experts", default=0)
    moe_layers = layers - dense_layers
    ffn = dense_layers * SWIGLU_MATRICES * hidden * config.count("intermediate_size") + moe_layers * shared * each
    dense = layers * attention + ffn + moe_layers * hidden * experts
    mla = Mla(latent_dim=latent, rope_dim=rope, qk_dim=nope + rope, v_dim=v_dim)
    return _finish(config, dense, experts, per_token, moe_layers * experts * each, mla=mla)


_KINDS: Mapping[str, Callable[[_Config], ModelProfile]] = {
    "llama": _decoder,
    "mistral": _decoder,
    "qwen2": _decoder,
    "qwen3": _decoder,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v2": _deepseek_v3,
}


def _head_dim(config: _Config) -> int:
    heads = config.count("num_attention_heads")
    return config.count("head_dim", default=0) or config.count("hidden_size") // max(heads, 1)


def _gqa_params(config: _Config) -> int:
    """Of one layer: query, key, value and output projections."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads", default=heads)
    return hidden * _head_dim(config) * (2 * heads + 2 * kv_heads)


def _finish(
    config: _Config,
    dense: float,
    experts: int,
    per_token: int,
    expert_params: float,
    *,
    mla: Mla | None = None,
    mxfp4_dense_bits: float = 16,
) -> ModelProfile:
    heads, embedding = config.count("num_attention_heads"), config.count("vocab_size") * config.count("hidden_size")
    precision, bits = _weights(config, experts > 0, mxfp4_dense_bits)
    full, window = _windows(config)
    return ModelProfile(
        name=config.name,
        full_layers=full,
        window_layers=window,
        window_tokens=config.count("sliding_window", default=0) if window else 0,
        hidden=config.count("hidden_size"),
        heads=heads,
        kv_heads=1 if mla else config.count("num_key_value_heads", default=heads),
        head_dim=mla.qk_dim if mla else _head_dim(config),
        experts=experts,
        experts_per_token=per_token,
        dense_params=dense + embedding,
        expert_params=expert_params,
        embedding_params=0 if config.flag("tie_word_embeddings", default=False) else embedding,
        precision=precision,
        bits=bits,
        mla=mla,
        max_context_tokens=config.count("max_position_embeddings", default=0) or None,
        sources={"": "config.json"},
    )


def _windows(config: _Config) -> tuple[int, int]:
    """Layers with full and with windowed attention."""
    layers = config.count("num_hidden_layers")
    kinds = config.fields.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ConfigInvalid(
                f"config of {config.name!r} has layer_types that do not name {layers} layers", param="layer_types"
            )
        strange = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
        if strange:
            raise ConfigInvalid(
                f"config of {config.name!r} has layers of {', '.join(strange)}",
                todo="write a model profile by hand",
                param="layer_types",
            )
        window = kinds.count("sliding_attention")
        return layers - window, window
    uses = config.fields.get("sliding_window") is not None and config.flag("use_sliding_window", default=True)
    if config.fields.get("model_type") == "gpt_oss":
        return layers - layers // 2, layers // 2
    return (0, layers) if uses and config.fields.get("model_type") == "mistral" else (layers, 0)


def _weights(
    config: _Config, has_experts: bool, mxfp4_dense_bits: float
) -> tuple[Precision, Mapping[Precision, WeightBits]]:
    known = {**BITS, Precision.FP4: WeightBits(8 if has_experts else NVFP4_BITS, NVFP4_BITS)}
    quantization = config.fields.get("quantization_config")
    if quantization is None:
        return Precision.BF16, known
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if method == "mxfp4":
        return Precision.FP4, {**known, Precision.FP4: WeightBits(mxfp4_dense_bits, MXFP4_BITS)}
    if method == "fp8":
        return Precision.FP8, known
    raise ConfigInvalid(
        f"config of {config.name!r} has weights quantized by {method!r}",
        todo="known methods are fp8 and mxfp4; write a model profile by hand",
        param="quantization_config",
    )
