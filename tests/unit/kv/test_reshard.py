from __future__ import annotations

import pytest

from isthmus_shared.errors import ManifestMismatch
from isthmus_shared.kv.canonical import CanonicalIndex, KvPart
from isthmus_shared.kv.manifest import KvDtype, KvScales, ScaleKind
from isthmus_shared.kv.reshard import HeadFlow, Heads, heads_of, owned_heads, plan_flows
from isthmus_shared.kv.shape import GroupShape, KvShape

PAIRS = [(1, 1), (1, 2), (2, 1), (1, 8), (8, 1), (4, 2), (2, 4), (8, 8), (16, 4), (4, 16)]


@pytest.mark.parametrize(("producer", "consumer"), PAIRS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_every_head_has_one_owner_and_reaches_all_who_want_it(kv_heads: int, producer: int, consumer: int) -> None:
    flows = plan_flows(kv_heads, producer, consumer)
    sent = [head for flow in flows for head in range(flow.heads.start, flow.heads.end)]
    assert sent == list(range(kv_heads)), "each once, in order"
    for rank in range(consumer):
        wanted = heads_of(rank, consumer, kv_heads)
        came = [h for f in flows if rank in f.consumer_ranks for h in range(f.heads.start, f.heads.end)]
        assert came == list(range(wanted.start, wanted.end)), "what it wants and nothing else"
    for flow in flows:
        held = heads_of(flow.producer_rank, producer, kv_heads)
        assert held.start <= flow.heads.start < flow.heads.end <= held.end, "the sender has it"


def test_replicated_heads_go_once() -> None:
    """Eight ranks with two heads: ranks 0 to 3 have the first, 4 to 7 the second."""
    assert [heads_of(rank, 8, 2).start for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [rank for rank, heads in enumerate(owned_heads(2, 8)) if heads is not None] == [0, 4]
    assert plan_flows(2, 8, 1) == (HeadFlow(0, (0,), Heads(0, 1)), HeadFlow(4, (0,), Heads(1, 1)))
    assert plan_flows(2, 1, 8) == (HeadFlow(0, (0, 1, 2, 3), Heads(0, 1)), HeadFlow(0, (4, 5, 6, 7), Heads(1, 1)))


def test_a_latent_goes_once_to_all() -> None:
    assert plan_flows(1, 8, 4) == (HeadFlow(0, (0, 1, 2, 3), Heads(0, 1)),)


def test_neighbouring_heads_for_the_same_ranks_are_one_flow() -> None:
    assert plan_flows(8, 4, 2) == tuple(HeadFlow(rank, (rank // 2,), Heads(rank * 2, 2)) for rank in range(4))
    assert plan_flows(8, 2, 4) == tuple(HeadFlow(rank // 2, (rank,), Heads(rank * 2, 2)) for rank in range(4))


@pytest.mark.parametrize(("kv_heads", "tp"), [(8, 3), (6, 4), (2, 3)])
def test_heads_that_do_not_divide_are_refused(kv_heads: int, tp: int) -> None:
    with pytest.raises(ManifestMismatch, match=f"{kv_heads} KV heads cannot be split over {tp}"):
        plan_flows(kv_heads, 1, tp)
    with pytest.raises(ManifestMismatch, match="multiple"):
        plan_flows(kv_heads, tp, 1)


def test_shards_of_a_shape_are_its_parts() -> None:
    scales = KvScales(kind=ScaleKind.HEAD, k=(1, 2, 3, 4, 5, 6, 7, 8), v=(11, 12, 13, 14, 15, 16, 17, 18))
    full = GroupShape((0, 2), 4, 16, dtype=KvDtype.FP8_E4M3FN, scales=scales)
    latent = GroupShape((1,), 1, 40, latent=True)
    shape = KvShape("f", KvDtype.BF16, (full, latent))
    first, second = shape.narrow_heads(0, 1).manifest(10), shape.narrow_heads(1, 3).manifest(10)
    assert first.total_bytes + second.total_bytes == shape.manifest(10).total_bytes
    assert [len(manifest.groups) for manifest in (first, second)] == [2, 1], "the latent goes once"
    group = second.groups[0]
    assert (group.head_start, group.kv_heads, group.model_heads) == (1, 3, 4)
    assert group.scales is not None
    assert group.scales.k == (2, 3, 4, 6, 7, 8)
    assert group.scales.v == (12, 13, 14, 16, 17, 18)
    assert shape.narrow_heads(0, 4).groups[0] == full


def test_a_latent_has_one_part_and_scales_per_block_follow_their_rows() -> None:
    scales = KvScales(kind=ScaleKind.BLOCK, block_tokens=16)
    full = GroupShape((3,), 2, 8, window_tokens=20, dtype=KvDtype.FP8_E4M3FN, scales=scales)
    shape = KvShape("f", KvDtype.BF16, (GroupShape((0, 1), 1, 576, latent=True), full))
    index = CanonicalIndex(shape.manifest(40))
    assert index.parts(0) == (KvPart.K,)
    assert index.parts(3) == (KvPart.K, KvPart.V)
    assert index.whole(1, KvPart.K).offset_bytes == 40 * 576 * 2
    assert index.scales(0, KvPart.K) is None
    k, v = (index.whole(3, part) for part in KvPart)
    ks, vs = (index.scales(3, part) for part in KvPart)
    assert ks is not None
    assert vs is not None
    # The token at 39 sees 20 to 39: blocks of scales 1 and 2.
    sizes = [(span.offset_bytes - 2 * 40 * 576 * 2, span.size_bytes) for span in (k, ks, v, vs)]
    assert sizes == [(0, 320), (320, 16), (336, 320), (656, 16)]
    assert index.total_bytes == shape.manifest(40).total_bytes == 2 * 40 * 576 * 2 + 672
