"""A small seeded checkpoint in Hugging Face form, for tests and benchmarks that have no model at hand. Torch-free.

The weights are random; what matters is that they make every token of the prompt matter, that logits are well apart
(greedy is not a matter of the last bit), and that output is mostly printable and ends now and then.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

BYTES = 256
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID = BYTES, BYTES + 1, BYTES + 2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class TinySize:
    """3.9 million parameters; every second layer slides."""

    hidden: int = 256
    intermediate: int = 640
    layers: int = 6
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    window: int = 128
    max_position: int = 8192
    seed: int = 20


def ensure_tiny_checkpoint(path: Path, size: TinySize | None = None) -> Path:
    """The folder, made if it is not there. Safe when several processes do it at once: one rename wins."""
    if (path / _WEIGHTS).exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        _write(draft, size or TinySize())
        draft.chmod(0o755)
        try:
            os.rename(draft, path)
        except OSError:
            if not (path / _WEIGHTS).exists():  # not lost to another process: something else is in the way
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path


def _write(folder: Path, size: TinySize) -> None:
    vocab_size = BYTES + len(SPECIAL_TOKENS)
    _write_json(folder / "config.json", model_config(size, vocab_size))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(size))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(_tensors(size, vocab_size), str(folder / _WEIGHTS), metadata={"format": "pt"})


def model_config(size: TinySize, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["IsthmusTinyForCausalLM"],
        "model_type": "isthmus_tiny",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": size.max_position,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": size.window,
        "layer_types": ["full_attention" if i % 2 == 0 else "sliding_attention" for i in range(size.layers)],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": PAD_TOKEN_ID,
        "torch_dtype": "float16",
    }


def tokenizer_config(size: TinySize) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": size.max_position,
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "pad_token": SPECIAL_TOKENS[2],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def byte_tokenizer() -> Tokenizer:
    """Byte b is token b; the special tokens follow. Lossless for any text."""
    vocabulary = {_byte_char(byte): byte for byte in range(BYTES)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _byte_char(byte: int) -> str:
    """The character by which byte-level tokenizers write a byte: itself if visible in Latin-1, else from U+0100 on."""
    visible = [b for b in range(BYTES) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    if byte in visible:
        return chr(byte)
    return chr(BYTES + [b for b in range(BYTES) if b not in visible].index(byte))


def _tensors(size: TinySize, vocab_size: int) -> dict[str, npt.NDArray[np.float16]]:
    """Philox numbers: the same on every machine. fp16 on disk hides a last-bit difference of its log and exp."""
    random = np.random.Generator(np.random.Philox(size.seed))

    def normal(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float16]:
        scale = gain / columns**0.5
        return np.asarray(random.standard_normal((rows, columns)) * scale, dtype=np.float16)

    hidden, q_size, kv_size = size.hidden, size.heads * size.head_dim, size.kv_heads * size.head_dim
    ones = np.ones(hidden, dtype=np.float16)
    tensors = {
        "model.embed_tokens.weight": normal(vocab_size, hidden, gain=hidden**0.5),
        "model.norm.weight": ones,
        "lm_head.weight": (normal(vocab_size, hidden, gain=3.0) * _head_gain(vocab_size)).astype(np.float16),
    }
    for layer in range(size.layers):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": ones,
            f"{at}.post_attention_layernorm.weight": ones,
            f"{at}.self_attn.q_proj.weight": normal(q_size, hidden, gain=2.0),  # sharp: single tokens are looked at
            f"{at}.self_attn.k_proj.weight": normal(kv_size, hidden),
            f"{at}.self_attn.v_proj.weight": normal(kv_size, hidden),
            f"{at}.self_attn.o_proj.weight": normal(hidden, q_size, gain=2.0),
            f"{at}.self_attn.sinks": random.standard_normal(size.heads).astype(np.float16),
            f"{at}.mlp.gate_proj.weight": normal(size.intermediate, hidden),
            f"{at}.mlp.up_proj.weight": normal(size.intermediate, hidden),
            f"{at}.mlp.down_proj.weight": normal(hidden, size.intermediate),
        }
    return tensors


def _head_gain(vocab_size: int) -> npt.NDArray[np.float64]:
    """Printable ASCII is likely, end-of-sequence possible, other bytes rare, other special tokens out of reach."""
    gain = np.full((vocab_size, 1), 0.4)
    gain[32:127] = 1.0
    gain[BYTES:] = 0.0
    gain[EOS_TOKEN_ID] = 0.8
    return gain


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", "utf-8")
