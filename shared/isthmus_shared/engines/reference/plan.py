"""One step's tensors of indices: which rows are whose, and which cache slots each query may see.

Keys are taken in tiles of `TILE` tokens that begin at multiples of `TILE` in the sequence, and every matrix product
has a multiple of `ROW_ALIGN` rows. So a query's sums are taken in the same order whatever else is in the step, in
a prefill chunk or as a decode, alone or in company: results are equal to the bit, not just close.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus_shared.engines.sequence import Work
from isthmus_shared.kv.paged import PagedKv

TILE = 256
"""Keys in a tile: a decode step of a short context pays for one tile, a long one for few products."""
ROW_ALIGN = 8
"""CPU matrix kernels treat 1 to 4 rows by other code with another order of summation; from 8 on, rows are alike."""


@dataclass(frozen=True, slots=True)
class KeyView:
    """What the queries of one group see in layers of one window."""

    slots: Tensor
    """[sequences, keys]; keys is a multiple of TILE. Past its end a sequence's own last slot is repeated."""
    hidden: Tensor
    """[sequences, queries, keys] bool: not visible."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences computed together, each with the same number of query rows."""

    rows: Tensor
    """[sequences · queries], rows of the step."""
    sequences: int
    queries: int
    views: dict[int | None, KeyView]


@dataclass(frozen=True, slots=True)
class StepPlan:
    tokens: Tensor
    """[rows], padded with token 0 to a multiple of ROW_ALIGN."""
    positions: Tensor
    """[rows]"""
    rows: int
    """Without padding."""
    slots: Tensor
    """[rows without padding]: where each row's K and V go."""
    groups: tuple[AttentionGroup, ...]
    sampled: Tensor
    """Rows whose logits are wanted, in the order of the works that sample."""


def make_plan(works: Sequence[Work], kv: PagedKv, windows: Sequence[int | None]) -> StepPlan:
    kinds = tuple(dict.fromkeys(windows))
    rows = sum(len(work.tokens) for work in works)
    padding = -rows % ROW_ALIGN
    tokens = [token for work in works for token in work.tokens] + [0] * padding
    positions = [position for work in works for position in range(work.start, work.end)] + [0] * padding
    first_row, at = [], 0
    for work in works:
        first_row.append(at)
        at += len(work.tokens)
    singles: dict[int, list[int]] = {}
    groups = []
    for index, work in enumerate(works):
        if len(work.tokens) == 1:
            tiles = -(-work.end // TILE)
            singles.setdefault((tiles - 1).bit_length(), []).append(index)
        else:
            groups.append(_group([work], [first_row[index]], kv, kinds))
    for members in singles.values():
        groups.append(_group([works[i] for i in members], [first_row[i] for i in members], kv, kinds))
    return StepPlan(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        rows=rows,
        slots=torch.cat([kv.slots(work.block_table, work.start, work.end) for work in works]),
        groups=tuple(groups),
        sampled=torch.tensor([first_row[i] + len(w.tokens) - 1 for i, w in enumerate(works) if w.sample]).long(),
    )


def _group(works: list[Work], first_rows: list[int], kv: PagedKv, kinds: tuple[int | None, ...]) -> AttentionGroup:
    queries = len(works[0].tokens)
    starts = torch.tensor([work.start for work in works])
    positions = starts[:, None] + torch.arange(queries)
    table = torch.zeros(len(works), max(len(work.block_table) for work in works), dtype=torch.int64)
    for row, work in enumerate(works):
        table[row, : len(work.block_table)] = torch.tensor(work.block_table)
    rows = torch.tensor(first_rows)[:, None] + torch.arange(queries)
    views = {window: _view(positions, table, window, kv.layout.block_tokens) for window in kinds}
    return AttentionGroup(rows.reshape(-1), len(works), queries, views)


def _view(positions: Tensor, table: Tensor, window: int | None, block_tokens: int) -> KeyView:
    last = positions[:, -1]
    if window is None:
        first_tile = torch.zeros_like(last)
    else:
        first_tile = torch.clamp(positions[:, 0] - window + 1, min=0) // TILE
    tiles = int((last // TILE - first_tile).max()) + 1
    keys = first_tile[:, None] * TILE + torch.arange(tiles * TILE)
    own = torch.minimum(keys, last[:, None])
    slots = table.gather(1, own // block_tokens) * block_tokens + own % block_tokens
    hidden = keys[:, None, :] > positions[:, :, None]
    if window is not None:
        hidden |= keys[:, None, :] <= positions[:, :, None] - window
    return KeyView(slots, hidden)
