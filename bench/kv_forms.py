"""How quickly KV goes between a cache of each form and staging, beside torch's own copies of the same bytes; one core.

    python bench/kv_forms.py [--tokens 32768] [--rounds 9] [--json FILE]

Two yardsticks, taken in turn with what they measure, in the same round: `copy_` between two dense tensors (what the
bytes cost without any change of order), and `copy_` that changes the order as this form needs it, of neighbouring
blocks (what torch makes of the same permutation). Ratios are of CPU seconds, above 1 is quicker than torch; the median
of all rounds is told. With the default number of tokens a copy is larger than a CPU's caches, and a call's own cost
(some 60 µs; for small copies see --tokens) does not show. What was moved is checked before it is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from isthmus_shared.kv.layout import KvLayout
from isthmus_shared.kv.paged import PagedKv
from isthmus_shared.kv.views import gather_part, row_shape, scatter_part

LAYERS = 3
"""The three copies of a round are of different layers, so that none finds what another has just touched."""
KV_HEADS, HEAD_DIM = 8, 128
LAYOUTS = (
    "nhd:16:bf16",
    "nhd:64:bf16",
    "gaudi-128",
    "hnd:16:bf16",
    "hnd:64:bf16",
    "nvidia-flash",
    "nvidia-flashinfer",
    "amd-aiter",
    "amd-shuffle",
    "hnd:64:bf16:packed8",
    "cpu",
    "cpu:fp32",
    "nvidia-flash:fp8_e4m3fn",
    "amd-shuffle:fp8_e4m3fnuz",
)
DENSE = frozenset({"nhd:16:bf16", "nhd:64:bf16", "gaudi-128"})
"""In canonical order: only blocks are moved."""


@dataclass
class Row:
    layout: str
    part: str
    table: str
    way: str
    gb_per_s: float
    of_copy: float
    """Yardstick's CPU seconds ÷ these."""
    of_permuting_copy: float
    wanted: float
    """Of the plain copy."""


def cpu_s(work: Callable[[int], object], layer: int) -> float:
    began = time.process_time()
    work(layer)
    return time.process_time() - began


def measure(name: str, part: int, table: Tensor, neighbouring: bool, tokens: int, rounds: int) -> list[Row]:
    layout = KvLayout.parse(name)
    blocks = 2 * layout.blocks_for(tokens)
    kv = PagedKv(layout, layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, blocks=blocks)
    caches = [views.parts[part] for views in kv.views]
    staging = [torch.zeros((tokens, *row_shape(caches[0])), dtype=kv.dtype) for _ in range(LAYERS)]
    dense = [torch.zeros_like(one) for one in staging]
    for one in (*dense, *staging, *(tensor for tensors in kv.tensors for tensor in tensors)):
        one.view(torch.uint8).random_()  # Memory that nobody has touched is not there yet.
    check(caches[0], table, dense[0], tokens)
    used = layout.blocks_for(tokens)
    shape = (used, *caches[0].shape[1:])
    ordered = [torch.unflatten(torch.unflatten(one, 2, shape[4:]), 0, shape[:3]) for one in dense]
    works: dict[str, tuple[Callable[[int], object], Callable[[int], object]]] = {
        "gather": (
            lambda at: gather_part(caches[at], table, 0, tokens, staging[at]),
            lambda at: ordered[at].copy_(caches[at][:used]),
        ),
        "scatter": (
            lambda at: scatter_part(caches[at], table, 0, tokens, staging[at]),
            lambda at: caches[at][:used].copy_(ordered[at]),
        ),
    }
    rows = []
    for way, (ours, permuting) in works.items():
        timed = {"ours": ours, "copy": lambda at: staging[at].copy_(dense[at]), "permuting": permuting}
        seconds: dict[str, list[float]] = {"ours": [], "copy": [], "permuting": []}
        for round_index in range(rounds + 1):
            took = {}
            for turn in range(3):
                key = ("ours", "copy", "permuting")[(round_index + turn) % 3]
                took[key] = cpu_s(timed[key], (round_index + turn) % LAYERS)
            if round_index:
                for key, value in took.items():
                    seconds[key].append(value)
        ratios = {
            key: statistics.median(b / a for a, b in zip(seconds["ours"], seconds[key], strict=True))
            for key in ("copy", "permuting")
        }
        size = dense[0].numel() * dense[0].element_size()
        rate = size / statistics.median(seconds["ours"]) / 1e9
        table_name = "in a row" if neighbouring else "scattered"
        wanted = 0.8 if name in DENSE else 0.5
        rows.append(Row(name, "KV"[part], table_name, way, rate, ratios["copy"], ratios["permuting"], wanted))
    return rows


def check(cache: Tensor, table: Tensor, rows: Tensor, tokens: int) -> None:
    back = torch.zeros_like(rows)
    scatter_part(cache, table, 0, tokens, rows)
    gather_part(cache, table, 0, tokens, back)
    if not torch.equal(back.view(torch.uint8), rows.view(torch.uint8)):
        raise SystemExit("what was gathered is not what was scattered")


def main() -> None:
    parser = argparse.ArgumentParser(description="KV conversions beside torch's copies, on one core.")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="names, comma-separated")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("layout | part | blocks | way | GB/s | of copy_ (wanted) | of a permuting copy_\n---|---|---|---|---|---|---")
    for name in options.layouts.split(","):
        layout = KvLayout.parse(name)
        blocks = layout.blocks_for(options.tokens)
        scattered = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(0))[:blocks]
        for part in range(2):
            for neighbouring, table in ((False, scattered), (True, torch.arange(blocks) + blocks // 2)):
                for row in measure(name, part, table, neighbouring, options.tokens, options.rounds):
                    rows.append(row)
                    print(
                        f"{row.layout} | {row.part} | {row.table} | {row.way} | {row.gb_per_s:.1f} "
                        f"| {row.of_copy:.2f} ({row.wanted}) | {row.of_permuting_copy:.2f}"
                    )
                    sys.stdout.flush()
    missed = [row for row in rows if row.of_copy < row.wanted]
    print(f"\n{len(rows) - len(missed)} of {len(rows)} reach what is wanted of the plain copy_;", end=" ")
    print(f"{sum(row.of_permuting_copy >= row.wanted for row in rows)} of the permuting one")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
