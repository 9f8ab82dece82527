"""Rows of a cache straight into staging memory and out of it.

Staging comes as memory views, cut where a slot ends, which may be in the middle of a row. Whole rows are copied in one
pass between cache and staging; only a row that a cut goes through takes a detour.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from isthmus_shared.kv.fp8 import convert_codes
from isthmus_shared.kv.manifest import KvDtype
from isthmus_shared.kv.views import gather_part, row_shape, scatter_part

Move = Callable[[int, int, Tensor], None]
"""move(first row, end row, rows): rows [n, heads, head_dim], in staging or beside it."""


def gather_rows(
    part: Tensor, block_table: Tensor, token_start: int, token_end: int, memory: Sequence[memoryview]
) -> None:
    """Tokens `token_start … token_end − 1` of one part of `LayerViews` into `memory`, canonical.

    `memory`: writable views (format B), together exactly that long. On an accelerator the work is only enqueued.
    """

    def move(start: int, end: int, rows: Tensor) -> None:
        gather_part(part, block_table, token_start + start, token_start + end, rows)

    shape, at = row_shape(part), 0
    for rows, cut in _pieces(part, token_end - token_start, memory):
        if rows is not None:
            move(at, at + len(rows), rows)
            at += len(rows)
        else:
            detour = torch.empty((_rows(part, cut), *shape), dtype=part.dtype)
            move(at, at + len(detour), detour)
            _synchronise(part)
            _spread(detour.view(torch.uint8).view(-1), cut)
            at += len(detour)


def scatter_rows(
    part: Tensor,
    block_table: Tensor,
    token_start: int,
    token_end: int,
    memory: Sequence[memoryview],
    *,
    flavours: tuple[KvDtype, KvDtype] | None = None,
) -> None:
    """The way back; `memory` may be read-only. `flavours` (the bytes', the cache's): FP8 codes are changed on the way.

    Raises `TransferFailed` for a code that the cache's flavour does not have (see `kv.fp8`).
    """
    shape, at = row_shape(part), token_start
    for rows, cut in _pieces(part, token_end - token_start, memory):
        if rows is None:
            rows = torch.cat(cut).view(part.dtype).view(-1, *shape)
        if flavours is not None and flavours[0] is not flavours[1]:
            codes = rows.view(torch.uint8).clone()
            convert_codes(codes, *flavours)
            rows = codes.view(part.dtype)
        scatter_part(part, block_table, at, at + len(rows), rows)
        at += len(rows)


def _pieces(part: Tensor, tokens: int, memory: Sequence[memoryview]) -> Iterator[tuple[Tensor | None, list[Tensor]]]:
    """In order: (whole rows, []) in staging, or (None, pieces of the bytes of rows) that cannot be used as they lie.

    Those are a row that a cut goes through, and rows at an address that is no multiple of an element's size.
    """
    shape = row_shape(part)
    row_bytes = shape[0] * shape[1] * part.element_size()
    assert sum(len(view) for view in memory) == tokens * row_bytes, "staging and rows are of one size"
    cut: list[Tensor] = []
    missing = 0
    for view in memory:
        if missing:
            cut.append(bytes_of(view[:missing]))
            view, missing = view[missing:], missing - len(cut[-1])
            if missing == 0:
                yield None, cut
                cut = []
        whole = len(view) // row_bytes * row_bytes
        if whole:
            data = bytes_of(view[:whole])
            if data.data_ptr() % part.element_size():
                yield None, [data]
            else:
                yield data.view(part.dtype).view(-1, *shape), []
        if whole < len(view):
            cut.append(bytes_of(view[whole:]))
            missing = row_bytes - len(cut[-1])


def _rows(part: Tensor, pieces: list[Tensor]) -> int:
    heads, dim = row_shape(part)
    return sum(len(piece) for piece in pieces) // (heads * dim * part.element_size())


def bytes_of(view: memoryview) -> Tensor:
    """uint8 [len(view)] in the same memory. Whoever gets it from a read-only view must not write to it."""
    if not view.readonly:
        return torch.frombuffer(view, dtype=torch.uint8)
    # Torch has no read-only tensors, and warns of a view that is one.
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_ubyte * len(view)).from_address(address), dtype=torch.uint8)


def _spread(row: Tensor, pieces: list[Tensor]) -> None:
    for target, source in zip(pieces, torch.split(row, [len(piece) for piece in pieces]), strict=True):
        target.copy_(source)


def _synchronise(part: Tensor) -> None:
    if part.device.type != "cpu":
        torch.accelerator.synchronize(part.device)
