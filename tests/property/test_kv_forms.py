"""KV keeps every element through any layout and through the canonical form."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_shared.kv.canonical import CanonicalIndex, KvPart
from isthmus_shared.kv.layout import HeadOrder, KvLayout
from isthmus_shared.kv.manifest import KvDtype
from isthmus_shared.kv.paged import TORCH_DTYPES, PagedKv
from isthmus_shared.kv.shape import GroupShape, KvShape

HEADS, DIM = 2, 8

layouts = st.one_of(
    st.builds(KvLayout, st.integers(1, 9), st.sampled_from(HeadOrder), st.sampled_from(KvDtype)),
    st.builds(
        KvLayout, st.integers(1, 9), st.just(HeadOrder.HND), st.sampled_from(KvDtype), st.sampled_from([1, 2, 4, 8])
    ),
)


@given(layout=layouts)
def test_a_layout_is_written_and_read_back(layout: KvLayout) -> None:
    assert KvLayout.parse(str(layout)) == layout


def rounded(values: torch.Tensor, dtype: KvDtype) -> torch.Tensor:
    """As a cache of that dtype gives them back."""
    if not dtype.is_fp8:
        return values.to(TORCH_DTYPES[dtype])
    return (values.clamp(-448, 448)).to(torch.float8_e4m3fn).float()


@settings(max_examples=60, deadline=None)
@given(layout=layouts, tokens=st.integers(1, 40), seed=st.integers(0, 2**31), data=st.data())
def test_what_is_scattered_is_gathered(layout: KvLayout, tokens: int, seed: int, data: st.DataObject) -> None:
    blocks = layout.blocks_for(tokens) + 2
    table = data.draw(st.permutations(range(blocks)))
    random = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(tokens, HEADS, DIM, generator=random) for _ in range(2))
    cache = PagedKv(layout, layers=1, kv_heads=HEADS, head_dim=DIM, blocks=blocks)
    cut = data.draw(st.integers(0, tokens))
    for start, end in ((cut, tokens), (0, cut)):
        cache.scatter(0, cache.slots(table, start, end), k[start:end], v[start:end])
    got_k, got_v = cache.gather(0, cache.slots(table, 0, tokens))
    assert torch.equal(got_k, rounded(k, layout.dtype))
    assert torch.equal(got_v, rounded(v, layout.dtype))
    written = sum(int(torch.count_nonzero(t.float())) for t in cache.tensors[0])
    assert written == int(torch.count_nonzero(got_k)) + int(torch.count_nonzero(got_v)), "a stray element was written"


group_shapes = st.builds(
    GroupShape,
    layer_ids=st.just((0,)),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 4),
    window_tokens=st.one_of(st.none(), st.integers(1, 20)),
)


@settings(max_examples=100, deadline=None)
@given(
    shapes=st.lists(st.tuples(group_shapes, st.integers(1, 3)), min_size=1, max_size=3),
    dtype=st.sampled_from(KvDtype),
    prompt=st.integers(1, 50),
    cuts=st.sets(st.integers(1, 49)),
)
def test_chunks_of_all_layers_cover_the_canonical_bytes_once_and_in_order(
    shapes: list[tuple[GroupShape, int]], dtype: KvDtype, prompt: int, cuts: set[int]
) -> None:
    groups, layer = [], 0
    for shape, layers in shapes:
        ids = tuple(range(layer, layer + layers))
        groups.append(GroupShape(ids, shape.kv_heads, shape.head_dim, shape.window_tokens))
        layer += layers
    manifest = KvShape("f", dtype, tuple(groups)).manifest(prompt)
    index = CanonicalIndex(manifest)
    assert index.total_bytes == manifest.total_bytes
    edges = [0, *sorted(cut for cut in cuts if cut < prompt), prompt]
    spans = [
        span
        for start, end in itertools.pairwise(edges)
        for layer in index.layers
        for part in KvPart
        if (span := index.span(layer, part, start, end)) is not None
    ]
    covered = sorted((span.offset_bytes, span.offset_bytes + span.size_bytes) for span in spans)
    assert covered[0][0] == 0
    assert covered[-1][1] == manifest.total_bytes
    assert all(left[1] == right[0] for left, right in itertools.pairwise(covered))
    wholes = [index.whole(layer, part).offset_bytes for layer in index.layers for part in KvPart]
    assert wholes == sorted(wholes)
