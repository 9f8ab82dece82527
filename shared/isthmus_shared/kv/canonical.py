"""Where (layer, K or V, tokens) lies in a flow's canonical byte string (see `kv.manifest`). Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from isthmus_shared.kv.manifest import SCALE_BYTES, KvGroup, KvManifest


class KvPart(IntEnum):
    """K and V; a latent is its layer's only part, at K's place."""

    K = 0
    V = 1


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `token_start … token_end − 1` of one layer's K or V, and their bytes."""

    offset_bytes: int
    size_bytes: int
    token_start: int
    token_end: int


class CanonicalIndex:
    """Offsets of one manifest."""

    def __init__(self, manifest: KvManifest) -> None:
        self.manifest = manifest
        self._base: dict[int, int] = {}
        self._group: dict[int, KvGroup] = {}
        offset = 0
        for group in manifest.groups:
            for layer in group.layer_ids:
                self._base[layer], self._group[layer] = offset, group
                offset += group.parts * manifest.part_bytes(group)
        self.total_bytes = offset

    @property
    def layers(self) -> tuple[int, ...]:
        """Layer ids in the order of the wire."""
        return tuple(self._base)

    def group(self, layer: int) -> KvGroup:
        return self._group[layer]

    def parts(self, layer: int) -> tuple[KvPart, ...]:
        """K and V; for a latent only K, which then is the latent."""
        return tuple(KvPart)[: self._group[layer].parts]

    def span(self, layer: int, part: KvPart, token_start: int, token_end: int) -> Span | None:
        """The part of those tokens that the flow carries; None if it carries none of them."""
        group = self._group[layer]
        start, end = max(token_start, group.token_start), min(token_end, group.token_end)
        if start >= end:
            return None
        row = self.manifest.rows_bytes(group) // group.tokens
        offset = self._part(layer, part) + (start - group.token_start) * row
        return Span(offset, (end - start) * row, start, end)

    def whole(self, layer: int, part: KvPart) -> Span:
        group = self._group[layer]
        span = self.span(layer, part, group.token_start, group.token_end)
        assert span is not None, "a group is never empty"
        return span

    def scales(self, layer: int, part: KvPart) -> Span | None:
        """Where the scales per block are, fp32 [scale_blocks, heads]; None if there are none in the flow."""
        group = self._group[layer]
        if not group.scale_blocks:
            return None
        offset = self._part(layer, part) + self.manifest.rows_bytes(group)
        size = group.scale_blocks * group.kv_heads * SCALE_BYTES
        return Span(offset, size, group.token_start, group.token_end)

    def _part(self, layer: int, part: KvPart) -> int:
        group = self._group[layer]
        assert part < group.parts, f"layer {layer} has {group.parts} parts"
        return self._base[layer] + part * self.manifest.part_bytes(group)
