"""A Hugging Face folder's tensors, checked against the configuration and stacked for fewer, larger products."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from isthmus_shared.engines.reference.fingerprint import weight_files
from isthmus_shared.engines.reference.model_config import ModelConfig
from isthmus_shared.errors import ConfigInvalid


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Tensor
    """[in, out]: transposed once, so that rows of activations multiply it as they are."""
    bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        return rows @ self.weight if self.bias is None else torch.addmm(self.bias, rows, self.weight)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: Tensor
    qkv: Linear
    o: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    """[heads]"""
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear


def load_weights(folder: Path, config: ModelConfig) -> ModelWeights:
    """All in fp32, on the thread's default device. Raises `ConfigInvalid` for a missing tensor or a wrong shape."""
    tensors = _Tensors(folder)
    hidden = config.hidden
    embedding = tensors.take("model.embed_tokens.weight", (config.vocab_size, hidden))
    if config.tied_embeddings:
        head = embedding
    else:
        head = tensors.take("lm_head.weight", (config.vocab_size, hidden))
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_layer(tensors, config, index) for index in range(config.layers)),
        final_norm=tensors.take("model.norm.weight", (hidden,)),
        head=Linear(head.T.contiguous()),
    )


def _layer(tensors: _Tensors, config: ModelConfig, index: int) -> LayerWeights:
    at, hidden, dim = f"model.layers.{index}", config.hidden, config.head_dim
    q_size, kv_size, inner = config.heads * dim, config.kv_heads * dim, config.intermediate
    attention, mlp = f"{at}.self_attn", f"{at}.mlp"
    qkv = [(f"{attention}.q_proj", q_size), (f"{attention}.k_proj", kv_size), (f"{attention}.v_proj", kv_size)]
    gate_up = [(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)]
    return LayerWeights(
        input_norm=tensors.take(f"{at}.input_layernorm.weight", (hidden,)),
        qkv=tensors.linear(qkv, hidden, bias=config.qkv_bias),
        o=tensors.linear([(f"{attention}.o_proj", hidden)], q_size, bias=config.o_bias),
        q_norm=tensors.take(f"{attention}.q_norm.weight", (dim,)) if config.qk_norm else None,
        k_norm=tensors.take(f"{attention}.k_norm.weight", (dim,)) if config.qk_norm else None,
        sinks=tensors.take(f"{attention}.sinks", (config.heads,)) if config.sinks else None,
        post_norm=tensors.take(f"{at}.post_attention_layernorm.weight", (hidden,)),
        gate_up=tensors.linear(gate_up, hidden, bias=config.mlp_bias),
        down=tensors.linear([(f"{mlp}.down_proj", hidden)], inner, bias=config.mlp_bias),
    )


class _Tensors:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, Tensor] = {}
        for path in weight_files(folder):
            try:
                self._tensors |= load_file(path)
            except (OSError, SafetensorError) as error:
                raise ConfigInvalid(f"weights {path} cannot be read", why=str(error), param="model_path") from error

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ConfigInvalid(f"tensor {name} is missing in {self._folder}", param="model_path")
        if tuple(tensor.shape) != shape:
            raise ConfigInvalid(
                f"tensor {name} has shape {tuple(tensor.shape)}",
                why=f"config.json makes it {shape}",
                param="model_path",
            )
        return tensor.to(device=torch.get_default_device(), dtype=torch.float32)

    def linear(self, parts: list[tuple[str, int]], inputs: int, *, bias: bool) -> Linear:
        """Projections of the same input as one."""
        weight = torch.cat([self.take(f"{name}.weight", (outputs, inputs)) for name, outputs in parts])
        if not bias:
            return Linear(weight.T.contiguous())
        joined = torch.cat([self.take(f"{name}.bias", (outputs,)) for name, outputs in parts])
        return Linear(weight.T.contiguous(), joined)
