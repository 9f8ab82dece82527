"""A dense transformer in numpy fp64, written from the papers' formulas and independent of the reference engine.

No cache, no batch, no paging: the whole sequence is computed anew for each token. Folders are in Hugging Face form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Array = npt.NDArray[np.float64]

_BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _BASE | {"model_type": "llama", "rope_theta": 500.0, "tie_word_embeddings": True},
    "llama3-rope": _BASE | {"model_type": "llama", "rope_theta": 500.0, "rope_scaling": _LLAMA3_ROPE},
    "llama-linear-rope-biases": _BASE
    | {
        "model_type": "llama",
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 6,
    },
    "qwen2": _BASE | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096},
    "qwen3": _BASE
    | {
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "eos_token_id": [2, 3],
    },
    "isthmus_tiny": _BASE
    | {
        "model_type": "isthmus_tiny",
        "head_dim": 16,
        "sliding_window": 20,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
}


def write_folder(folder: Path, config: dict[str, Any], *, shards: int = 2, seed: int = 5) -> dict[str, Array]:
    """A folder with random weights in `shards` files and their index; returns the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)
    random = np.random.default_rng(seed)
    tensors = {
        name: ((1.0 if name.endswith("norm.weight") else 0.0) + random.standard_normal(shape) * gain).astype(np.float32)
        for name, (shape, gain) in _tensor_shapes(config).items()
    }
    names = sorted(tensors)
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for i, file in enumerate(files):
        save_file({name: tensors[name] for name in names[i::shards]}, str(folder / file))
    index = {"metadata": {}, "weight_map": {name: files[i % shards] for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    return {name: tensor.astype(np.float64) for name, tensor in tensors.items()}


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], float]]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], head_dim(config)
    q_size, kv_size = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    kind, vocab = config["model_type"], config["vocab_size"]
    shapes: dict[str, tuple[tuple[int, ...], float]] = {
        "model.embed_tokens.weight": ((vocab, hidden), 1.0),
        "model.norm.weight": ((hidden,), 0.2),
    }
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = ((vocab, hidden), 0.5)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = ((hidden,), 0.2)
        shapes[f"{at}.post_attention_layernorm.weight"] = ((hidden,), 0.2)
        projections = [
            ("self_attn.q_proj", q_size, hidden, config.get("attention_bias") or kind == "qwen2"),
            ("self_attn.k_proj", kv_size, hidden, config.get("attention_bias") or kind == "qwen2"),
            ("self_attn.v_proj", kv_size, hidden, config.get("attention_bias") or kind == "qwen2"),
            ("self_attn.o_proj", hidden, q_size, config.get("attention_bias")),
            ("mlp.gate_proj", inner, hidden, config.get("mlp_bias")),
            ("mlp.up_proj", inner, hidden, config.get("mlp_bias")),
            ("mlp.down_proj", hidden, inner, config.get("mlp_bias")),
        ]
        for name, outputs, inputs, bias in projections:
            shapes[f"{at}.{name}.weight"] = ((outputs, inputs), 1.5 / math.sqrt(inputs))
            if bias:
                shapes[f"{at}.{name}.bias"] = ((outputs,), 0.3)
        if kind == "qwen3":
            shapes[f"{at}.self_attn.q_norm.weight"] = ((dim,), 0.3)
            shapes[f"{at}.self_attn.k_norm.weight"] = ((dim,), 0.3)
        if kind == "isthmus_tiny":
            shapes[f"{at}.self_attn.sinks"] = ((config["num_attention_heads"],), 1.0)
    return shapes


def naive_logprobs(config: dict[str, Any], weights: dict[str, Array], tokens: Sequence[int]) -> Array:
    """Log-probabilities [vocabulary] of the token after `tokens`."""
    x = weights["model.embed_tokens.weight"][list(tokens)]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        h = _rms(x, weights[f"{at}.input_layernorm.weight"], config)
        x = x + _attention(config, weights, f"{at}.self_attn", h, _window(config, layer))
        h = _rms(x, weights[f"{at}.post_attention_layernorm.weight"], config)
        gate = _project(weights, f"{at}.mlp.gate_proj", h)
        gate = gate / (1 + np.exp(-gate))
        x = x + _project(weights, f"{at}.mlp.down_proj", gate * _project(weights, f"{at}.mlp.up_proj", h))
    last = _rms(x[-1], weights["model.norm.weight"], config)
    head = weights["model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"]
    logits = head @ last
    shifted = logits - logits.max()
    result: Array = shifted - np.log(np.exp(shifted).sum())
    return result


def _window(config: dict[str, Any], layer: int) -> int | None:
    sliding = config.get("layer_types", [""] * (layer + 1))[layer] == "sliding_attention"
    return int(config["sliding_window"]) if sliding else None


def _attention(config: dict[str, Any], weights: dict[str, Array], at: str, h: Array, window: int | None) -> Array:
    heads, kv_heads, dim, count = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        head_dim(config),
        len(h),
    )
    q = _project(weights, f"{at}.q_proj", h).reshape(count, heads, dim)
    k = _project(weights, f"{at}.k_proj", h).reshape(count, kv_heads, dim)
    v = _project(weights, f"{at}.v_proj", h).reshape(count, kv_heads, dim)
    if f"{at}.q_norm.weight" in weights:
        q, k = _rms(q, weights[f"{at}.q_norm.weight"], config), _rms(k, weights[f"{at}.k_norm.weight"], config)
    q, k = _turn(q, config), _turn(k, config)
    result = np.zeros((count, heads, dim))
    for head in range(heads):
        shared = head // (heads // kv_heads)
        for i in range(count):
            first = 0 if window is None else max(0, i - window + 1)
            scores = np.exp(k[first : i + 1, shared] @ q[i, head] / math.sqrt(dim))
            total = scores.sum()
            if f"{at}.sinks" in weights:
                total += math.exp(weights[f"{at}.sinks"][head])
            result[i, head] = scores @ v[first : i + 1, shared] / total
    return _project(weights, f"{at}.o_proj", result.reshape(count, heads * dim))


def _turn(x: Array, config: dict[str, Any]) -> Array:
    """Rotary embedding as a product of complex numbers: dimension j with j + d / 2."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * np.array([_frequency(j, x.shape[-1], config) for j in range(half)])
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _frequency(j: int, dim: int, config: dict[str, Any]) -> float:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    frequency = float(scaling.get("rope_theta", config.get("rope_theta", 10000.0))) ** (-2 * j / dim)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequency
    if kind == "linear":
        return frequency / float(scaling["factor"])
    wavelength = 2 * math.pi / frequency
    context = scaling["original_max_position_embeddings"]
    if wavelength < context / scaling["high_freq_factor"]:
        return frequency
    if wavelength > context / scaling["low_freq_factor"]:
        return frequency / float(scaling["factor"])
    smooth = (context / wavelength - scaling["low_freq_factor"]) / (
        scaling["high_freq_factor"] - scaling["low_freq_factor"]
    )
    return float((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)


def _project(weights: dict[str, Array], name: str, x: Array) -> Array:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _rms(x: Array, weight: Array, config: dict[str, Any]) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config["rms_norm_eps"]) * weight
