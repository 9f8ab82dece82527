"""What a model's KV is, before a prompt is known: from it come the manifests of all its flows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus_shared.kv.manifest import GroupKind, KvDtype, KvGroup, KvManifest


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Layers of one kind. `window_tokens` None: full attention."""

    layer_ids: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class KvShape:
    model_fingerprint: str
    dtype: KvDtype
    groups: tuple[GroupShape, ...]

    @property
    def layers(self) -> int:
        return sum(len(group.layer_ids) for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in all layers."""
        elements = sum(2 * len(g.layer_ids) * g.kv_heads * g.head_dim for g in self.groups)
        return elements * self.dtype.itemsize_bytes

    def manifest(self, prompt_tokens: int) -> KvManifest:
        """Contents of the flow of a prompt of that length."""
        return KvManifest(
            model_fingerprint=self.model_fingerprint,
            dtype=self.dtype,
            prompt_tokens=prompt_tokens,
            groups=tuple(_group(shape, prompt_tokens) for shape in self.groups),
        )


def _group(shape: GroupShape, prompt_tokens: int) -> KvGroup:
    return KvGroup(
        kind=GroupKind.FULL if shape.window_tokens is None else GroupKind.SLIDING,
        layer_ids=shape.layer_ids,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        window_tokens=shape.window_tokens,
        token_start=first_visible_token(prompt_tokens, shape.window_tokens),
        token_end=prompt_tokens,
    )


def first_visible_token(position: int, window_tokens: int | None) -> int:
    """The first token that a query at `position` sees. A window counts the query's own token.

    Never beyond `position - 1`: a window of one token sees nothing of the prompt, but a flow has no empty groups.
    """
    if window_tokens is None:
        return 0
    return max(0, min(position - 1, position + 1 - window_tokens))


def group_layers(windows: Sequence[int | None], *, kv_heads: int, head_dim: int) -> tuple[GroupShape, ...]:
    """Groups of a model whose layer i has window `windows[i]`, in order of their first layer."""
    members: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        members.setdefault(window, []).append(layer)
    return tuple(GroupShape(tuple(layers), kv_heads, head_dim, window) for window, layers in members.items())
