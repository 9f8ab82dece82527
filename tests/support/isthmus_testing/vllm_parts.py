"""What the vLLM connector's parts are tested with, without vLLM: cache groups as vLLM describes them, caches, jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isthmus_kvrelay.client.vllm.jobs import FlowName, LoadJob, Origin, SaveJob
from isthmus_kvrelay.client.vllm.model_layers import LayerSpec, kv_shape
from isthmus_shared.kv.manifest import KvDtype
from isthmus_shared.kv.shape import KvShape
from isthmus_shared.messages.work import RelayRef

FINGERPRINT = "f" * 64
HEAD_DIM = 8


@dataclass
class FullAttentionSpec:
    """Named and shaped as vLLM's."""

    block_size: int = 16
    num_kv_heads: int = 2
    head_size: int = HEAD_DIM
    head_size_v: int | None = None
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int | None = 32


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    num_kv_heads: int = 1
    head_size_v: int | None = 0


@dataclass
class MambaSpec(FullAttentionSpec):
    pass


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: FullAttentionSpec = field(default_factory=FullAttentionSpec)


def layer_name(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


def layer_specs(
    *, layers: int = 2, block_tokens: int = 16, kv_heads: int = 2, window_tokens: int | None = None
) -> tuple[LayerSpec, ...]:
    """Full attention in group 0; with a window every second layer is in group 1 and has it."""
    return tuple(
        LayerSpec(
            name=layer_name(number),
            layer_id=number,
            group=number % 2 if window_tokens else 0,
            block_tokens=block_tokens,
            kv_heads=kv_heads,
            head_dim=HEAD_DIM,
            dtype=KvDtype.FP32,
            window_tokens=window_tokens if number % 2 else None,
        )
        for number in range(layers)
    )


def shape_of(specs: Sequence[LayerSpec], *, tp_size: int = 1, kv_heads_total: int | None = None) -> KvShape:
    total = specs[0].kv_heads * tp_size if kv_heads_total is None else kv_heads_total
    return kv_shape(specs, fingerprint=FINGERPRINT, tp_size=tp_size, kv_heads_total=total)


def cpu_cache(spec: LayerSpec, blocks: int) -> Tensor:
    """As vLLM's CPU backend allocates it, of nothing that a test could expect."""
    return torch.full((blocks, spec.kv_heads, spec.block_tokens, 2 * spec.head_dim), float("nan"))


def value(layer: int, part: int, token: int, head: int) -> Tensor:
    """[HEAD_DIM] that no other place has."""
    return torch.arange(HEAD_DIM) + 10.0 * head + 100.0 * part + 1000.0 * layer + 10_000.0 * token


def put(cache: Tensor, spec: LayerSpec, block: int, slot: int, head: int, part: int, row: Tensor) -> None:
    """Into a CPU_ATTN tensor: K transposed, then V."""
    half = spec.block_tokens * spec.head_dim
    inside = cache[block, head].view(-1)
    if part == 0:
        inside[:half].view(spec.head_dim, spec.block_tokens)[:, slot] = row
    else:
        inside[half:].view(spec.block_tokens, spec.head_dim)[slot] = row


def got(cache: Tensor, spec: LayerSpec, block: int, slot: int, head: int, part: int) -> Tensor:
    half = spec.block_tokens * spec.head_dim
    inside = cache[block, head].view(-1)
    if part == 0:
        return inside[:half].view(spec.head_dim, spec.block_tokens)[:, slot]
    return inside[half:].view(spec.block_tokens, spec.head_dim)[slot]


def save_job(
    request_id: str,
    blocks: Sequence[Sequence[int]],
    *,
    computed: int,
    prompt_tokens: int,
    producer_tp: int = 1,
    consumer_tp: int = 1,
) -> SaveJob:
    return SaveJob(
        request_id=request_id,
        flow=FlowName(f"xfer-{request_id}", 1, prompt_tokens, producer_tp, consumer_tp),
        blocks=tuple(tuple(group) for group in blocks),
        computed=computed,
        deadline_s=60.0,
    )


def load_job(save: SaveJob, relay: RelayRef, blocks: Sequence[Sequence[int]], *, start: int = 0) -> LoadJob:
    return LoadJob(
        request_id=save.request_id,
        flow=save.flow,
        origin=Origin(relay.node_id, relay.incarnation, relay.address, 1),
        blocks=tuple(tuple(group) for group in blocks),
        start=start,
        end=save.flow.prompt_tokens,
        deadline_s=60.0,
    )
