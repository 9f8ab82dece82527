"""Staging memory at any address and cut anywhere."""

from __future__ import annotations

import itertools

import pytest
import torch

from isthmus_shared.kv.layout import KvLayout
from isthmus_shared.kv.paged import PagedKv
from isthmus_shared.kv.staging import bytes_of, gather_rows, scatter_rows

TOKENS, HEADS, DIM = 70, 2, 32
TABLE = torch.tensor([4, 0, 2, 1, 5])
LAYOUTS = (
    "nhd:16:fp32",
    "hnd:16:bf16",
    "nvidia-flash:bf16",
    "amd-shuffle:bf16",
    "cpu:16:fp32",
    "amd-aiter:16:fp8_e4m3fn",
)


def cut(memory: memoryview, *at: int) -> list[memoryview]:
    return [memory[start:end] for start, end in itertools.pairwise((0, *at, len(memory)))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shift", [0, 1, 2, 3, 4, 8, 17])
def test_rows_are_the_same_at_any_address_and_wherever_slots_end(layout: str, shift: int) -> None:
    kv = PagedKv(KvLayout.parse(layout), layers=1, kv_heads=HEADS, head_dim=DIM, blocks=6)
    (raw, *_) = kv.tensors[0]
    raw.view(torch.uint8).copy_((torch.arange(raw.nbytes) * 7 % 251).view(raw.view(torch.uint8).shape))
    part = kv.views[0].parts[0]
    row = HEADS * DIM * part.element_size()
    plain = torch.empty((TOKENS, HEADS, DIM), dtype=kv.dtype)
    whole = bytes_of(memoryview(plain.view(torch.uint8).numpy()).cast("B"))
    gather_rows(part, TABLE, 0, TOKENS, [memoryview(whole.numpy())])
    for edges in ((), (row * 20,), (1, row * 3 + 5, row * 3 + 6, row * 50)):
        memory = memoryview(bytearray(TOKENS * row + 64))[shift : shift + TOKENS * row]
        gather_rows(part, TABLE, 0, TOKENS, cut(memory, *edges))
        assert bytes(memory) == whole.numpy().tobytes()
        before = raw.clone()
        raw.view(torch.uint8).zero_()
        scatter_rows(part, TABLE, 0, TOKENS, [view.toreadonly() for view in cut(memory, *edges)])
        back = torch.zeros_like(plain)
        gather_rows(part, TABLE, 0, TOKENS, [memoryview(back.view(torch.uint8).view(-1).numpy())])
        assert torch.equal(back.view(torch.uint8), plain.view(torch.uint8))
        raw.copy_(before)


def test_staging_of_another_size_is_no_place_for_rows() -> None:
    kv = PagedKv(KvLayout.parse("nhd:16:bf16"), layers=1, kv_heads=HEADS, head_dim=DIM, blocks=6)
    with pytest.raises(AssertionError, match="one size"):
        gather_rows(kv.views[0].parts[0], TABLE, 0, 3, [memoryview(bytearray(2 * HEADS * DIM * 2))])
