"""Where (layer, K or V, tokens) lies in a flow's canonical byte string (see `kv.manifest`). Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from isthmus_shared.kv.manifest import KvGroup, KvManifest


class KvPart(IntEnum):
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
                if layer in self._base:
                    raise ValueError(f"layer {layer} is in two groups of one manifest")
                self._base[layer], self._group[layer] = offset, group
                offset += 2 * group.tokens * self._row_bytes(group)
        self.total_bytes = offset

    @property
    def layers(self) -> tuple[int, ...]:
        """Layer ids in the order of the wire."""
        return tuple(self._base)

    def group(self, layer: int) -> KvGroup:
        return self._group[layer]

    def span(self, layer: int, part: KvPart, token_start: int, token_end: int) -> Span | None:
        """The part of those tokens that the flow carries; None if it carries none of them."""
        group = self._group[layer]
        start, end = max(token_start, group.token_start), min(token_end, group.token_end)
        if start >= end:
            return None
        row = self._row_bytes(group)
        offset = self._base[layer] + part * group.tokens * row + (start - group.token_start) * row
        return Span(offset, (end - start) * row, start, end)

    def whole(self, layer: int, part: KvPart) -> Span:
        group = self._group[layer]
        span = self.span(layer, part, group.token_start, group.token_end)
        assert span is not None, "a group is never empty"
        return span

    def _row_bytes(self, group: KvGroup) -> int:
        return group.row_elements * self.manifest.dtype.itemsize_bytes
