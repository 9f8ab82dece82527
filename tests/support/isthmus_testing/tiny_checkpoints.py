"""Seeded checkpoints of well-known architectures, about three million parameters each, in Hugging Face form.

Unlike the `reference` engine's own tiny model, these are what vLLM and transformers load. Numbers come from a Philox
generator and are rounded to fp16, so that the same bytes come out on every machine; they are stored in fp32, in which
two implementations can be compared token for token. Tensor names and shapes are those of the published checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from isthmus_shared.engines.reference.checkpoint import (
    BOS_TOKEN_ID,
    BYTES,
    CHAT_TEMPLATE,
    EOS_TOKEN_ID,
    PAD_TOKEN_ID,
    SPECIAL_TOKENS,
    byte_tokenizer,
)

Array = npt.NDArray[np.float32]

VOCAB_SIZE = BYTES + len(SPECIAL_TOKENS)
HIDDEN = 256
LAYERS = 4
WINDOW_TOKENS = 128
"""gpt-oss' own."""
_WEIGHTS = "model.safetensors"


class Family(StrEnum):
    LLAMA = "llama"
    QWEN3 = "qwen3"
    GPT_OSS = "gpt-oss"
    """Sliding window in every second layer, attention sinks, yarn, four experts."""
    DEEPSEEK_V3 = "deepseek-v3"
    """Multi-head latent attention, yarn, grouped experts chosen with a sigmoid and a correction bias."""


@dataclass(frozen=True, slots=True)
class _Form:
    config: dict[str, Any]
    tensors: Callable[[_Draw, dict[str, Any]], dict[str, Array]]


def write_tiny_checkpoint(folder: Path, family: Family, *, seed: int = 20) -> Path:
    """The folder, made if it is not there. Safe when several processes do it at once: one rename wins."""
    if (folder / _WEIGHTS).exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(draft, _FORMS[family], seed)
        draft.chmod(0o755)
        try:
            os.rename(draft, folder)
        except OSError:
            if not (folder / _WEIGHTS).exists():  # not lost to another process: something else is in the way
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write(folder: Path, form: _Form, seed: int) -> None:
    config = _COMMON | form.config
    draw = _Draw(seed)
    tensors = _outer(draw) | form.tensors(draw, config)
    tokens = {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[1], "pad_token": SPECIAL_TOKENS[2]}
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    } | tokens
    for name, fields in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        (folder / name).write_text(json.dumps(fields, indent=2) + "\n", "utf-8")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(tensors, str(folder / _WEIGHTS), metadata={"format": "pt"})


class _Draw:
    def __init__(self, seed: int) -> None:
        self._random = np.random.Generator(np.random.Philox(seed))

    def matrix(self, *shape: int, gain: float = 1.0, inputs: int | None = None) -> Array:
        """Normal, so that unit inputs give outputs of size `gain`. `inputs`: the last axis, if not another."""
        scale = gain / (inputs or shape[-1]) ** 0.5
        return self._rounded(self._random.standard_normal(shape) * scale)

    def vector(self, size: int, *, around: float = 0.0, spread: float = 0.1) -> Array:
        return self._rounded(around + spread * self._random.standard_normal(size))

    @staticmethod
    def _rounded(values: npt.NDArray[np.float64]) -> Array:
        """To fp16 and back: hides a last-bit difference of the generator's log and exp."""
        return values.astype(np.float16).astype(np.float32)


def _outer(draw: _Draw) -> dict[str, Array]:
    head = draw.matrix(VOCAB_SIZE, HIDDEN, gain=3.0)  # logits well apart: greedy is no matter of the last bit
    head[BYTES:] *= np.float32(0.5)  # special tokens end an output seldom
    return {
        "model.embed_tokens.weight": draw.matrix(VOCAB_SIZE, HIDDEN, gain=HIDDEN**0.5),
        "model.norm.weight": draw.vector(HIDDEN, around=1.0),
        "lm_head.weight": head,
    }


def _norms(draw: _Draw, at: str) -> dict[str, Array]:
    return {
        f"{at}.input_layernorm.weight": draw.vector(HIDDEN, around=1.0),
        f"{at}.post_attention_layernorm.weight": draw.vector(HIDDEN, around=1.0),
    }


def _attention(draw: _Draw, at: str, config: dict[str, Any]) -> dict[str, Array]:
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    return {
        f"{at}.q_proj.weight": draw.matrix(q_size, HIDDEN, gain=2.0),  # sharp: single tokens are looked at
        f"{at}.k_proj.weight": draw.matrix(kv_size, HIDDEN),
        f"{at}.v_proj.weight": draw.matrix(kv_size, HIDDEN),
        f"{at}.o_proj.weight": draw.matrix(HIDDEN, q_size, gain=2.0),
    }


def _mlp(draw: _Draw, at: str, inner: int) -> dict[str, Array]:
    return {
        f"{at}.gate_proj.weight": draw.matrix(inner, HIDDEN),
        f"{at}.up_proj.weight": draw.matrix(inner, HIDDEN),
        f"{at}.down_proj.weight": draw.matrix(HIDDEN, inner),
    }


def _dense(draw: _Draw, config: dict[str, Any]) -> dict[str, Array]:
    """Llama; with `qk_norm` Qwen3."""
    tensors: dict[str, Array] = {}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        tensors |= _norms(draw, at) | _attention(draw, f"{at}.self_attn", config)
        tensors |= _mlp(draw, f"{at}.mlp", config["intermediate_size"])
        if config["model_type"] == "qwen3":
            tensors[f"{at}.self_attn.q_norm.weight"] = draw.vector(config["head_dim"], around=1.5)
            tensors[f"{at}.self_attn.k_norm.weight"] = draw.vector(config["head_dim"], around=1.5)
    return tensors


def _gpt_oss(draw: _Draw, config: dict[str, Any]) -> dict[str, Array]:
    inner, experts = config["intermediate_size"], config["num_local_experts"]
    tensors: dict[str, Array] = {}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        attention = _attention(draw, f"{at}.self_attn", config)
        biases = {name.replace(".weight", ".bias"): draw.vector(tensor.shape[0]) for name, tensor in attention.items()}
        tensors |= _norms(draw, at) | attention | biases
        tensors |= {
            f"{at}.self_attn.sinks": draw.vector(config["num_attention_heads"], spread=2.0),
            f"{at}.mlp.router.weight": draw.matrix(experts, HIDDEN, gain=2.0),
            f"{at}.mlp.router.bias": draw.vector(experts),
            f"{at}.mlp.experts.gate_up_proj": draw.matrix(experts, HIDDEN, 2 * inner, inputs=HIDDEN),
            f"{at}.mlp.experts.gate_up_proj_bias": draw.matrix(experts, 2 * inner, gain=0.1, inputs=1),
            f"{at}.mlp.experts.down_proj": draw.matrix(experts, inner, HIDDEN, inputs=inner),
            f"{at}.mlp.experts.down_proj_bias": draw.matrix(experts, HIDDEN, gain=0.1, inputs=1),
        }
    return tensors


def _deepseek_v3(draw: _Draw, config: dict[str, Any]) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        tensors |= _norms(draw, at) | _latent_attention(draw, f"{at}.self_attn", config)
        if layer < config["first_k_dense_replace"]:
            tensors |= _mlp(draw, f"{at}.mlp", config["intermediate_size"])
            continue
        experts, inner = config["n_routed_experts"], config["moe_intermediate_size"]
        tensors[f"{at}.mlp.gate.weight"] = draw.matrix(experts, HIDDEN, gain=2.0)
        tensors[f"{at}.mlp.gate.e_score_correction_bias"] = draw.vector(experts)
        for expert in range(experts):
            tensors |= _mlp(draw, f"{at}.mlp.experts.{expert}", inner)
        tensors |= _mlp(draw, f"{at}.mlp.shared_experts", inner * config["n_shared_experts"])
    return tensors


def _latent_attention(draw: _Draw, at: str, config: dict[str, Any]) -> dict[str, Array]:
    heads, rope, nope = config["num_attention_heads"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    value, latent, q_rank = config["v_head_dim"], config["kv_lora_rank"], config["q_lora_rank"]
    return {
        f"{at}.q_a_proj.weight": draw.matrix(q_rank, HIDDEN),
        f"{at}.q_a_layernorm.weight": draw.vector(q_rank, around=1.0),
        f"{at}.q_b_proj.weight": draw.matrix(heads * (nope + rope), q_rank, gain=2.0),
        f"{at}.kv_a_proj_with_mqa.weight": draw.matrix(latent + rope, HIDDEN),
        f"{at}.kv_a_layernorm.weight": draw.vector(latent, around=1.0),
        f"{at}.kv_b_proj.weight": draw.matrix(heads * (nope + value), latent),
        f"{at}.o_proj.weight": draw.matrix(HIDDEN, heads * value, gain=2.0),
    }


def _yarn(factor: float, **more: Any) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
    } | more


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": PAD_TOKEN_ID,
    "torch_dtype": "float32",
}
_GROUPED: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_FORMS: dict[Family, _Form] = {
    Family.LLAMA: _Form(
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 640}
        | {"rope_parameters": _PLAIN_ROPE, "attention_bias": False, "mlp_bias": False}
        | _GROUPED,
        _dense,
    ),
    Family.QWEN3: _Form(
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "intermediate_size": 640}
        | {"rope_parameters": _PLAIN_ROPE, "attention_bias": False, "use_sliding_window": False}
        | _GROUPED,
        _dense,
    ),
    Family.GPT_OSS: _Form(
        {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "intermediate_size": 192}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "swiglu_limit": 7.0}
        | {"sliding_window": WINDOW_TOKENS, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
        | {"rope_parameters": _yarn(32.0, truncate=False, rope_theta=150000.0), "max_position_embeddings": 131072}
        | _GROUPED,
        _gpt_oss,
    ),
    Family.DEEPSEEK_V3: _Form(
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "intermediate_size": 512}
        | {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 512}
        | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "attention_bias": False}
        | {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        | {"moe_intermediate_size": 64, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
        | {"norm_topk_prob": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        # yarn, as published: with rope_type "default" vLLM's CPU kernel rotates only the first head of MLA's queries.
        | {"rope_parameters": _yarn(40.0, mscale=1.0, mscale_all_dim=1.0, rope_theta=10000.0)}
        | {"max_position_embeddings": 163840},
        _deepseek_v3,
    ),
}
