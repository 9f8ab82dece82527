"""Views, gather and scatter against arithmetic on flat memory, written out for each form by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.kv import form as forms
from isthmus_shared.kv.form import CacheForm
from isthmus_shared.kv.views import LayerViews, gather, scatter, views_of

B, N, H, D, X = 5, 8, 3, 16, 8  # X: 16 bytes of bf16
Place = Callable[[int, int, int, int, int], int]
"""(part, block, token, head, dim) → offset in the tensor's memory."""

CASES: dict[str, tuple[CacheForm, Callable[[], Tensor], Place]] = {
    "content, HND": (
        forms.CONTENT,
        lambda: numbers(B, H, N, 2 * D),
        lambda p, b, n, h, d: ((b * H + h) * N + n) * 2 * D + p * D + d,
    ),
    "content, NHD by strides": (
        forms.CONTENT,
        lambda: numbers(B, N, H, 2 * D).transpose(1, 2),
        lambda p, b, n, h, d: ((b * N + n) * H + h) * 2 * D + p * D + d,
    ),
    "stacked": (
        forms.STACKED,
        lambda: numbers(2, B, N, H, D),
        lambda p, b, n, h, d: (((p * B + b) * N + n) * H + h) * D + d,
    ),
    "stacked in the block": (
        forms.BLOCK_STACKED,
        lambda: numbers(B, 2, N, H, D),
        lambda p, b, n, h, d: (((b * 2 + p) * N + n) * H + h) * D + d,
    ),
    "CPU, K transposed": (
        forms.CPU_ATTN,
        lambda: numbers(B, H, N, 2 * D),
        lambda p, b, n, h, d: (b * H + h) * 2 * N * D + (n * D + d + N * D if p else d * N + n),
    ),
    "AITER shuffle": (
        forms.SHUFFLE,
        lambda: numbers(B, 2, N, H * D),
        lambda p, b, n, h, d: (
            (b * 2 + p) * N * H * D
            + (((h * (N // X) + n // X) * D + d) * X + n % X if p else ((h * (D // X) + d // X) * N + n) * X + d % X)
        ),
    ),
    "head slots": (
        forms.HEAD_SLOTS,
        lambda: numbers(B, 2 * H, N, D),
        lambda p, b, n, h, d: ((b * 2 * H + p * H + h) * N + n) * D + d,
    ),
    "flat slots, padded pages": (
        CacheForm("b (p n h d)"),
        lambda: numbers(B, 2 * N * H * D + 24)[:, : 2 * N * H * D],
        lambda p, b, n, h, d: b * (2 * N * H * D + 24) + ((p * N + n) * H + h) * D + d,
    ),
}
RANGES = [(0, 3 * N), (0, 1), (3, 4), (N - 1, N + 1), (5, 3 * N - 3), (0, 4 * N), (N, 2 * N), (2 * N + 1, 3 * N - 1)]


def numbers(*shape: int) -> Tensor:
    """Every element another 16-bit code. Integers stand for bf16, so that none of them is a NaN."""
    count = torch.Size(shape).numel()
    assert count < 2**16
    return torch.arange(count).to(torch.int16).view(shape)


def tokens_of(raw: Tensor, place: Place, part: int, table: list[int], start: int, end: int) -> Tensor:
    """What a gather has to give, element by element."""
    memory = raw.as_strided((raw.untyped_storage().nbytes() // raw.element_size(),), (1,), 0)
    offsets = [place(part, table[t // N], t % N, h, d) for t in range(start, end) for h in range(H) for d in range(D)]
    return memory[torch.tensor(offsets)].view(end - start, H, D)


def empty(start: int, end: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.zeros(end - start, H, D, dtype=torch.int16) for _ in range(2))  # type: ignore[return-value]


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> tuple[LayerViews, Tensor, Place]:
    form, make, place = CASES[request.param]
    raw = make()
    return views_of(raw, form, block_tokens=N, kv_heads=H, head_dim=D), raw, place


@pytest.mark.parametrize("table", [[3, 0, 4, 1], [1, 2, 3, 4], [0, 1, 4, 3]], ids=str)
def test_gather_takes_every_element_from_its_place(case: tuple[LayerViews, Tensor, Place], table: list[int]) -> None:
    views, raw, place = case
    assert (views.blocks, views.block_tokens, views.heads, views.head_dim) == (B, N, H, D)
    for start, end in RANGES:
        out = empty(start, end)
        gather(views, torch.tensor(table), start, end, out)
        for part in range(2):
            assert torch.equal(out[part], tokens_of(raw, place, part, table, start, end))


def test_scatter_writes_every_element_to_its_place_and_no_other(case: tuple[LayerViews, Tensor, Place]) -> None:
    views, raw, place = case
    table = [3, 0, 4, 1]
    for start, end in RANGES:
        before = raw.clone()
        new = tuple(torch.randint(-999, 0, (end - start, H, D), dtype=torch.int16) for _ in range(2))
        scatter(views, torch.tensor(table), start, end, new)
        for part in range(2):
            assert torch.equal(tokens_of(raw, place, part, table, start, end), new[part])
        assert int((raw != before).sum()) == 2 * new[0].numel(), "the old numbers are not negative"
        raw.copy_(before)


def test_heads_are_narrowed_and_staging_may_be_strided(case: tuple[LayerViews, Tensor, Place]) -> None:
    views, raw, place = case
    whole = tuple(torch.zeros(20, H + 2, D, dtype=torch.int16) for _ in range(2))
    gather(views.narrow_heads(1, 2), torch.tensor([2, 4, 0]), 1, 21, tuple(one[:, 2:4] for one in whole))
    for part in range(2):
        assert torch.equal(whole[part][:, 2:4], tokens_of(raw, place, part, [2, 4, 0], 1, 21)[:, 1:])
        assert not whole[part][:, [0, 1, 4]].any()


@pytest.mark.parametrize(("form", "shape"), [(forms.MLA, (B, N, 24)), (forms.MLA_HEAD, (B, 1, N, 24))])
def test_a_latent_has_one_part(form: CacheForm, shape: tuple[int, ...]) -> None:
    raw = numbers(*shape)
    views = views_of(raw, form, block_tokens=N, kv_heads=1, head_dim=24)
    out = torch.zeros(13, 1, 24, dtype=torch.int16)
    gather(views, torch.tensor([4, 2]), 2, 15, (out,))
    assert torch.equal(out[:, 0], torch.cat([raw.view(B, N, 24)[4], raw.view(B, N, 24)[2]])[2:15])
    scatter(views, torch.tensor([0, 1]), 2, 15, (out,))
    assert torch.equal(raw.view(B * N, 24)[2:15], out[:, 0])


def test_k_and_v_may_be_two_tensors() -> None:
    k, v = numbers(B, H, D // X, N, X), numbers(B, H, N, D) + 20000
    views = views_of((k, v), forms.PACKED_K, block_tokens=N, kv_heads=H, head_dim=D)
    out = empty(0, N)
    gather(views, torch.tensor([3]), 0, N, out)
    assert torch.equal(out[0], k[3].permute(2, 0, 1, 3).reshape(N, H, D))
    assert torch.equal(out[1], v[3].transpose(0, 1))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("b h n", "'d' is missing"),
        ("b h n q d", "'q' is none of"),
        ("b h n d d", "'d' is there twice"),
        ("b h n [d]", "'[]' is not an axis"),
        ("b (p h) n d | -", "a latent has no V"),
        ("b p n d | b n d", "in one tensor"),
        ("- | b n d", "one form for K"),
        ("b n d | b n d | b n d", "one form for K"),
    ],
)
def test_a_bad_form_is_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        CacheForm(text)
    assert named in refused.value.why


@pytest.mark.parametrize(
    ("raw", "form", "named"),
    [
        (numbers(B, H, N, D), forms.CONTENT, "axis 3 of the tensor (pd) has 16 elements where 32 belong"),
        (numbers(B, H + 1, N, 2 * D), forms.CONTENT, "axis 1 of the tensor (h) has 4 elements where 3 belong"),
        (numbers(B, N, H, 2 * D).transpose(1, 2), forms.CPU_ATTN, "don't lie together"),
        (numbers(B, N * H * D), forms.SHUFFLE, "2 axes"),
        (numbers(B, N, 24), forms.MLA, "no head axis"),
        (numbers(B, N, H, D), forms.NHD, "K and V apart"),
        ((numbers(B, N, H, D), numbers(B, N, H, D)), forms.CONTENT, "in one tensor"),
    ],
)
def test_a_tensor_of_another_form_is_refused(raw: Tensor, form: CacheForm, named: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        views_of(raw, form, block_tokens=N, kv_heads=H, head_dim=D)
    assert named in refused.value.text


@pytest.mark.parametrize("table", [[0, -1, 2], [0, 1, B], [B + 3, 0, 1]])
@pytest.mark.parametrize("way", [gather, scatter])
def test_a_block_that_is_not_there_is_neither_read_nor_written(
    case: tuple[LayerViews, Tensor, Place], table: list[int], way: Callable[..., None]
) -> None:
    views, raw, _ = case
    before = raw.clone()
    with pytest.raises(AssertionError, match="blocks"):
        way(views, torch.tensor(table), 0, 3 * N, empty(0, 3 * N))
    assert torch.equal(raw, before)
