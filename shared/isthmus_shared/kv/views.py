"""A paged cache tensor of any form as strided views in one logical form, and the way between it and staging.

    views = views_of(raw, CPU_ATTN, block_tokens=128, kv_heads=8, head_dim=128)
    gather(views, block_table, 0, 300, (k, v))       # cache → staging, [300, 8, 128] each, one pass
    scatter(views, block_table, 0, 300, (k, v))      # staging → cache

On an accelerator the work is enqueued on the current stream of the cache's device: whoever reads what `gather` wrote,
or reuses what `scatter` read, waits for an event recorded behind it. On the CPU both have happened on return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.kv.blocks import Ids, gather_blocks, scatter_blocks
from isthmus_shared.kv.form import Axes, CacheForm, run_elements

_ORDER = "bnmhdx"
"""Axes of a view: blocks, tokens of a block in runs, heads, head dim in runs. Most forms have runs of one."""


@dataclass(frozen=True, slots=True)
class Way:
    """From cache to staging, or back."""

    copy: Callable[[Tensor, Tensor], None]
    """copy(cache, staging): two tensors of one shape."""
    blocks: Callable[[Tensor, Ids, Tensor], None]
    """blocks(part, block ids, staging)."""


@dataclass(frozen=True, slots=True)
class LayerViews:
    """One layer's K and V, or its latent: views that share the cache's memory, each [blocks, n, m, heads, d, x].

    n · m = block_tokens and d · x = head_dim; a token t of a block is at [t // m, t % m], element e of a head at
    [e // x, e % x]. A latent is one part with one head.
    """

    parts: tuple[Tensor, ...]

    @property
    def blocks(self) -> int:
        return self.parts[0].shape[0]

    @property
    def block_tokens(self) -> int:
        return self.parts[0].shape[1] * self.parts[0].shape[2]

    @property
    def heads(self) -> int:
        return self.parts[0].shape[3]

    @property
    def head_dim(self) -> int:
        return self.parts[0].shape[4] * self.parts[0].shape[5]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def narrow_heads(self, start: int, count: int) -> LayerViews:
        """The same cache with heads `start … start + count − 1` only (a tensor-parallel re-shard)."""
        assert 0 <= start < start + count <= self.heads, f"heads {start}+{count} of {self.heads}"
        return LayerViews(tuple(part.narrow(3, start, count) for part in self.parts))


def views_of(
    raw: Tensor | tuple[Tensor, Tensor],
    form: CacheForm,
    *,
    block_tokens: int,
    kv_heads: int,
    head_dim: int,
    run: int | None = None,
) -> LayerViews:
    """Views of one layer's cache tensor, or of its K and V tensors if `form` has them apart.

    `block_tokens` is the block size that block tables count in, `run` the length of ``x`` and ``m`` if not that of 16
    bytes. Strides are the tensor's own. Raises `ConfigInvalid` when the tensor cannot have that form, naming the axis
    and both sizes.
    """
    raws = raw if isinstance(raw, tuple) else (raw,) * len(form.parts)
    if isinstance(raw, tuple) == form.joined or len(raws) != len(form.parts):
        raise _refuse(form, "this form has K and V in one tensor" if form.joined else "this form has K and V apart")
    run = run_elements(raws[0].element_size()) if run is None else run
    sizes = {"p": 2, "n": block_tokens, "h": kv_heads, "d": head_dim, "1": 1, "run": run}
    pairs = zip(raws, form.parts, strict=True)
    return LayerViews(tuple(_view(one, form, axes, sizes, part) for part, (one, axes) in enumerate(pairs)))


def _view(raw: Tensor, form: CacheForm, axes: Axes, known: dict[str, int], part: int) -> Tensor:
    """[blocks, n, m, heads, d, x] of one part."""
    sizes, letters, run = dict(known), "".join(axes), known["run"]
    for short, long in (("x", "d"), ("m", "n")):
        if short in letters:
            if sizes[long] % run:
                raise _refuse(form, f"{sizes[long]} of {long!r} are not whole runs of {run}")
            sizes[short], sizes[long] = run, sizes[long] // run
    if "h" not in letters and sizes["h"] != 1:
        raise _refuse(form, f"it has no head axis, but there are {sizes['h']} heads")
    if raw.dim() < len(axes):
        raise _refuse(form, f"the tensor has {raw.dim()} axes, {tuple(raw.shape)}")
    if raw.dim() > len(axes):
        raw = _flatten(raw, form, len(axes) - 1)
    view = raw
    for index in reversed(range(len(axes))):
        view = torch.unflatten(view, index, _split(raw.shape[index], axes[index], sizes, form, index))
    if "p" in letters:
        view = view.select(letters.index("p"), part)
        letters = letters.replace("p", "")
    ones = [index for index, letter in enumerate(letters) if letter == "1"]
    view, letters = view.squeeze(ones) if ones else view, letters.replace("1", "")
    view = view.permute([letters.index(letter) for letter in _ORDER if letter in letters])
    for index, letter in enumerate(_ORDER):
        if letter not in letters:
            view = view.unsqueeze(index)
    return view


def _flatten(raw: Tensor, form: CacheForm, start: int) -> Tensor:
    """`raw` with its last axes as one, in the same memory."""
    try:
        return raw.view(*raw.shape[:start], -1)
    except RuntimeError:
        why = f"axes {start} to {raw.dim() - 1} of {tuple(raw.shape)}, strides {raw.stride()}, don't lie together"
        raise _refuse(form, why) from None


def _split(size: int, letters: str, sizes: dict[str, int], form: CacheForm, index: int) -> list[int]:
    """Sizes of the axes that one axis holds; the number of blocks follows from the tensor."""
    rest = 1
    for letter in letters:
        rest *= 1 if letter == "b" else sizes[letter]
    if "b" in letters and size % rest == 0:
        return [size // rest if letter == "b" else sizes[letter] for letter in letters]
    if size != rest:
        raise _refuse(form, f"axis {index} of the tensor ({letters}) has {size} elements where {rest} belong")
    return [sizes[letter] for letter in letters]


def _refuse(form: CacheForm, why: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"the cache tensor is not of the form {form}",
        why=why,
        todo="name the form of the attention backend in use",
        param="kv_layout",
    )


def gather(views: LayerViews, block_table: Tensor, token_start: int, token_end: int, staging: Sequence[Tensor]) -> None:
    """Copy tokens `token_start … token_end − 1` of a sequence into `staging`: one [tokens, heads, head_dim] a part.

    `block_table` (int64 [≥ blocks of those tokens], on the CPU) is the sequence's, from its token 0. `staging` has the
    cache's dtype and any strides, on the CPU or the cache's device.
    """
    _copy_all(views, block_table, token_start, token_end, staging, _GATHER)


def scatter(
    views: LayerViews, block_table: Tensor, token_start: int, token_end: int, staging: Sequence[Tensor]
) -> None:
    """The way back: `staging` as for `gather`; it is only read."""
    _copy_all(views, block_table, token_start, token_end, staging, _SCATTER)


def _copy_all(
    views: LayerViews, table: Tensor, token_start: int, token_end: int, staging: Sequence[Tensor], way: Way
) -> None:
    assert len(staging) == len(views.parts), f"{len(staging)} tensors for {len(views.parts)} parts"
    for part, place in zip(views.parts, staging, strict=True):
        _copy_part(part, table, token_start, token_end, place, way)


def gather_part(part: Tensor, block_table: Tensor, token_start: int, token_end: int, place: Tensor) -> None:
    """`gather` of one part of `LayerViews`."""
    _copy_part(part, block_table, token_start, token_end, place, _GATHER)


def scatter_part(part: Tensor, block_table: Tensor, token_start: int, token_end: int, place: Tensor) -> None:
    """`scatter` of one part of `LayerViews`."""
    _copy_part(part, block_table, token_start, token_end, place, _SCATTER)


def row_shape(part: Tensor) -> tuple[int, int]:
    """(heads, head_dim) of a token's row."""
    return part.shape[3], part.shape[4] * part.shape[5]


def _to_staging(cache: Tensor, staging: Tensor) -> None:
    staging.copy_(cache, non_blocking=True)


def _to_cache(cache: Tensor, staging: Tensor) -> None:
    cache.copy_(staging, non_blocking=True)


_GATHER = Way(_to_staging, gather_blocks)
_SCATTER = Way(_to_cache, scatter_blocks)


def _copy_part(part: Tensor, table: Tensor, token_start: int, token_end: int, place: Tensor, way: Way) -> None:
    """The whole blocks at once, and at either end the block of which only some tokens are wanted."""
    shape = (token_end - token_start, *row_shape(part))
    assert tuple(place.shape) == shape, f"staging of {tuple(place.shape)} for {shape}"
    assert place.dtype == part.dtype, f"staging of {place.dtype} for a cache of {part.dtype}"
    size = part.shape[1] * part.shape[2]
    assert token_end <= len(table) * size, f"a table of {len(table)} blocks for token {token_end}"
    ids = table.numpy()
    used = ids[token_start // size : -(-token_end // size)]
    assert 0 <= used.min() <= used.max() < part.shape[0], f"blocks {used.tolist()} of {part.shape[0]}"
    first, last = -(-token_start // size), token_end // size
    if token_start < first * size:
        block = first - 1
        end = min(token_end, first * size)
        _copy_tokens(part[int(ids[block])], token_start - block * size, end - block * size, place, way.copy)
    if first < last:
        rows = place[first * size - token_start : last * size - token_start]
        if rows.is_contiguous():
            rows = rows.view(last - first, *part.shape[1:])
        else:
            rows = torch.unflatten(torch.unflatten(rows, 2, part.shape[4:]), 0, (last - first, *part.shape[1:3]))
        way.blocks(part, ids[first:last], rows)
    if last * size < token_end and last >= first:
        rows = place[last * size - token_start :] if last * size > token_start else place
        start = max(token_start, last * size) - last * size
        _copy_tokens(part[int(ids[last])], start, token_end - last * size, rows, way.copy)


def _copy_tokens(block: Tensor, start: int, end: int, rows: Tensor, copy: Callable[[Tensor, Tensor], None]) -> None:
    """Tokens `start … end − 1` of one block [n, m, heads, d, x]; rows [≥ end − start, heads, head_dim]."""
    run = block.shape[1]
    rows = torch.unflatten(rows, 2, block.shape[3:])
    while start < end:
        stop = min(end, (start // run + 1) * run)
        if start % run == 0:
            stop = max(stop, end // run * run)
        if stop - start >= run and run > 1 and start % run == 0:
            runs = (stop - start) // run
            copy(block[start // run : start // run + runs], torch.unflatten(rows[: runs * run], 0, (runs, run)))
        elif run == 1:
            stop = end
            copy(block[start:stop, 0], rows[: stop - start])
        else:
            copy(block[start // run, start % run : start % run + stop - start], rows[: stop - start])
        rows, start = rows[stop - start :], stop
