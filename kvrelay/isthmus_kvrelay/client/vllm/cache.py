"""One rank's cache tensors, and copies between them and staging."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isthmus_kvrelay.client.vllm.flows import RankFlow
from isthmus_kvrelay.client.vllm.jobs import Blocks
from isthmus_kvrelay.client.vllm.model_layers import LayerSpec
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.kv.canonical import KvPart
from isthmus_shared.kv.form import CacheForm
from isthmus_shared.kv.views import LayerViews, gather, scatter, views_of

Views = Callable[[int, int], Sequence[memoryview]]
"""map(offset_bytes, size_bytes) of a sink or a source."""
Fence = torch.cuda.Event | None
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
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def fence(self) -> Fence:
        """Behind all that the engine has enqueued."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def save(
        self, flow: RankFlow, layer_id: int, blocks: Blocks, tokens: range, mapped: Views, after: Fence
    ) -> list[tuple[int, int]]:
        """Cache → staging, those tokens as far as the flow carries them; the filled (offset, size) of the flow."""
        return self._copy(flow, layer_id, blocks, tokens, mapped, after, gather)

    def load(self, flow: RankFlow, layer_id: int, blocks: Blocks, tokens: range, mapped: Views) -> None:
        """Staging → cache."""
        self._copy(flow, layer_id, blocks, tokens, mapped, None, scatter)

    def _copy(
        self,
        flow: RankFlow,
        layer_id: int,
        blocks: Blocks,
        tokens: range,
        mapped: Views,
        after: Fence,
        copy: Callable[[LayerViews, Tensor, int, int, Sequence[Tensor]], None],
    ) -> list[tuple[int, int]]:
        layer, index = self.layers[layer_id], flow.index
        views = layer.views.narrow_heads(flow.heads.start, flow.heads.count)
        row = (views.heads, views.head_dim)
        spans = [index.span(layer_id, part, tokens.start, tokens.stop) for part in index.parts(layer_id)]
        if spans[0] is None:
            return []
        table, (start, end) = layer.table(blocks), (spans[0].token_start, spans[0].token_end)
        done = []
        with torch.inference_mode(), self._on_stream(after):
            for part, span in zip(index.parts(layer_id), spans, strict=True):
                assert span is not None, "all parts of a layer have the same tokens"
                one = LayerViews((views.parts[part],))
                with _staging(mapped(span.offset_bytes, span.size_bytes), views.dtype, copy is gather) as flat:
                    copy(one, table, start, end, (flat.view(end - start, *row),))
                    if self._stream is not None:
                        self._stream.synchronize()
                done.append((span.offset_bytes, span.size_bytes))
        return done

    @contextlib.contextmanager
    def _on_stream(self, after: Fence) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
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


@contextlib.contextmanager
def _staging(views: Sequence[memoryview], dtype: torch.dtype, write: bool) -> Iterator[Tensor]:
    """Those pieces of memory as one flat tensor: the memory itself when it is one piece, else by way of a copy."""
    if len(views) == 1:
        yield _tensor_over(views[0]).view(dtype)
        return
    whole = torch.empty(sum(view.nbytes for view in views), dtype=torch.uint8)
    pieces = whole.split([view.nbytes for view in views])
    if not write:
        for piece, view in zip(pieces, views, strict=True):
            piece.copy_(_tensor_over(view))
    yield whole.view(dtype)
    if write:
        for piece, view in zip(pieces, views, strict=True):
            _tensor_over(view).copy_(piece)


def _tensor_over(view: memoryview) -> Tensor:
    """uint8, sharing the view's memory, which has to outlive it. Torch knows no read-only tensors: it is on us."""
    address = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return torch.frombuffer((ctypes.c_ubyte * view.nbytes).from_address(address), dtype=torch.uint8)
