"""One rank's cache tensors, and copies between them and staging."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus_kvrelay.client.vllm.flows import RankFlow
from isthmus_kvrelay.client.vllm.jobs import Blocks
from isthmus_kvrelay.client.vllm.model_layers import LayerSpec
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.kv.form import CacheForm
from isthmus_shared.kv.staging import gather_rows, scatter_rows
from isthmus_shared.kv.views import LayerViews, views_of

Views = Callable[[int, int], Sequence[memoryview]]
"""map(offset_bytes, size_bytes) of a sink or a source."""
Fence = torch.Event | None
"""A point in the engine's stream; None on a CPU, where what was called has been done."""


@dataclass(frozen=True, slots=True)
class CachedLayer:
    spec: LayerSpec
    views: LayerViews
    split: int
    """Blocks of the tensor for each block of the scheduler's tables: kernels may count in smaller ones."""

    def table(self, blocks: Blocks) -> Tensor:
        """int64 [blocks of the tensor]"""
        ids = torch.tensor(blocks[self.spec.group], dtype=torch.int64)
        if self.split == 1:
            return ids
        return (ids[:, None] * self.split + torch.arange(self.split)).flatten()


class RankCache:
    """All layers of one rank."""

    def __init__(
        self, specs: Iterable[LayerSpec], tensors: Mapping[str, Tensor], form_of: Callable[[str], CacheForm]
    ) -> None:
        """`tensors` as vLLM registers them, `form_of` a layer's name. Raises `ConfigInvalid` if one does not fit."""
        self.layers: dict[int, CachedLayer] = {}
        self.by_name: dict[str, int] = {}
        for spec in specs:
            tensor = tensors.get(spec.name)
            if tensor is None:
                raise ConfigInvalid(f"vLLM registered no cache for layer {spec.name}", param="kv_connector")
            self.layers[spec.layer_id] = _cached(spec, tensor, form_of(spec.name))
            self.by_name[spec.name] = spec.layer_id
        self.device = next(iter(self.layers.values())).views.parts[0].device
        self._stream = torch.Stream(self.device) if self.device.type != "cpu" else None

    def fence(self) -> Fence:
        """Behind all that the engine has enqueued."""
        if self._stream is None:
            return None
        return torch.accelerator.current_stream(self.device).record_event()

    def save(
        self, flow: RankFlow, layer_id: int, blocks: Blocks, tokens: range, mapped: Views, after: Fence
    ) -> list[tuple[int, int]]:
        """Cache → staging, those tokens as far as the flow carries them; the filled (offset, size) of the flow."""
        return self._copy(flow, layer_id, blocks, tokens, mapped, after, gather_rows)

    def load(self, flow: RankFlow, layer_id: int, blocks: Blocks, tokens: range, mapped: Views, after: Fence) -> None:
        """Staging → cache."""
        self._copy(flow, layer_id, blocks, tokens, mapped, after, scatter_rows)

    def _copy(
        self,
        flow: RankFlow,
        layer_id: int,
        blocks: Blocks,
        tokens: range,
        mapped: Views,
        after: Fence,
        copy: Callable[[Tensor, Tensor, int, int, Sequence[memoryview]], None],
    ) -> list[tuple[int, int]]:
        layer, index = self.layers[layer_id], flow.index
        views = layer.views.narrow_heads(flow.heads.start, flow.heads.count)
        parts = index.parts(layer_id)
        spans = [span for part in parts if (span := index.span(layer_id, part, tokens.start, tokens.stop)) is not None]
        if not spans:
            return []
        table = layer.table(blocks)
        with torch.inference_mode(), self._on_stream(after):
            for part, span in zip(parts, spans, strict=True):
                memory = mapped(span.offset_bytes, span.size_bytes)
                copy(views.parts[part], table, span.token_start, span.token_end, memory)
            if self._stream is not None:
                self._stream.synchronize()
        return [(span.offset_bytes, span.size_bytes) for span in spans]

    @contextlib.contextmanager
    def _on_stream(self, after: Fence) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with self._stream:
            if after is not None:
                self._stream.wait_event(after)
            yield


def _cached(spec: LayerSpec, tensor: Tensor, form: CacheForm) -> CachedLayer:
    """The tensor's own block size may divide the scheduler's."""
    tokens = tensor.shape[2] if tensor.dim() == 4 else tensor.shape[1]
    if spec.block_tokens % tokens:
        raise ConfigInvalid(
            f"layer {spec.name} has blocks of {tokens} tokens in memory",
            why=f"the scheduler counts in blocks of {spec.block_tokens}, which are not whole numbers of those",
            param="block_size",
        )
    views = views_of(tensor, form, block_tokens=tokens, kv_heads=spec.kv_heads, head_dim=spec.head_dim)
    return CachedLayer(spec, views, spec.block_tokens // tokens)
