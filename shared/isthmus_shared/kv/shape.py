"""What a model's KV is, before a prompt is known: from it come the manifests of all its flows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from isthmus_shared.kv.manifest import GroupKind, KvDtype, KvGroup, KvManifest, KvScales, ScaleKind, needed_version


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Layers of one kind. `window_tokens` None: full attention. The other fields are `KvGroup`'s."""

    layer_ids: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window_tokens: int | None = None
    latent: bool = False
    """MLA: `head_dim` is the latent's size, `kv_heads` is 1."""
    dtype: KvDtype | None = None
    scales: KvScales | None = None
    head_start: int = 0
    heads_total: int | None = None

    @property
    def kind(self) -> GroupKind:
        if self.latent:
            return GroupKind.LATENT
        return GroupKind.FULL if self.window_tokens is None else GroupKind.SLIDING

    def narrow_heads(self, start: int, count: int) -> GroupShape:
        """The shard with the model's heads `start … start + count − 1`; this group has all of them."""
        assert self.heads_total is None, "a shard is not cut again"
        if count == self.kv_heads:
            return self
        scales = None if self.scales is None else _narrow_scales(self.scales, self.kv_heads, start, count)
        return replace(self, kv_heads=count, head_start=start, heads_total=self.kv_heads, scales=scales)


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
        """Bytes that one token takes in all layers, without scales."""
        return sum(
            (1 if g.latent else 2) * len(g.layer_ids) * g.kv_heads * g.head_dim * (g.dtype or self.dtype).itemsize_bytes
            for g in self.groups
        )

    def narrow_heads(self, start: int, count: int) -> KvShape:
        """The shard with those heads in every group. A latent is the same on every rank: it goes with head 0, once."""
        own = (group for group in self.groups if start == 0 or not group.latent)
        groups = (group if group.latent else group.narrow_heads(start, count) for group in own)
        return replace(self, groups=tuple(groups))

    def manifest(self, prompt_tokens: int) -> KvManifest:
        """Contents of the flow of a prompt of that length."""
        groups = tuple(_group(shape, prompt_tokens) for shape in self.groups)
        return KvManifest(
            version=needed_version(self.dtype, groups),
            model_fingerprint=self.model_fingerprint,
            dtype=self.dtype,
            prompt_tokens=prompt_tokens,
            groups=groups,
        )


def _group(shape: GroupShape, prompt_tokens: int) -> KvGroup:
    """A window's tokens are those that the last token of the prompt sees: an engine may compute that one again."""
    return KvGroup(
        kind=shape.kind,
        layer_ids=shape.layer_ids,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        window_tokens=shape.window_tokens,
        token_start=first_visible_token(prompt_tokens - 1, shape.window_tokens),
        token_end=prompt_tokens,
        head_start=shape.head_start,
        heads_total=shape.heads_total,
        dtype=shape.dtype,
        scales=shape.scales,
    )


def _narrow_scales(scales: KvScales, heads: int, start: int, count: int) -> KvScales:
    if scales.kind is not ScaleKind.HEAD:
        return scales

    def cut(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(v for at in range(start, len(values), heads) for v in values[at : at + count])

    return scales.model_copy(update={"k": cut(scales.k), "v": cut(scales.v)})


def first_visible_token(position: int, window_tokens: int | None) -> int:
    """The first token that a query at `position` sees. A window counts the query's own token."""
    return 0 if window_tokens is None else max(0, position + 1 - window_tokens)


def scaled(groups: tuple[GroupShape, ...], scale: float) -> tuple[GroupShape, ...]:
    """The same groups of FP8, with one scale for everything."""

    def scales(group: GroupShape) -> KvScales:
        values = (scale,) * len(group.layer_ids)
        return KvScales(kind=ScaleKind.TENSOR, k=values, v=() if group.latent else values)

    return tuple(replace(group, scales=scales(group)) for group in groups)


def group_layers(windows: Sequence[int | None], *, kv_heads: int, head_dim: int) -> tuple[GroupShape, ...]:
    """Groups of a model whose layer i has window `windows[i]`, in order of their first layer."""
    members: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        members.setdefault(window, []).append(layer)
    return tuple(GroupShape(tuple(layers), kv_heads, head_dim, window) for window, layers in members.items())
