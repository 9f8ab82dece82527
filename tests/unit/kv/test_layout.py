from __future__ import annotations

import pytest

from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.kv.layout import KvLayout


def test_the_two_demo_layouts_have_their_vendors_shapes() -> None:
    cuda = KvLayout.parse("nhd:16:fp32")
    assert cuda.k_shape(10, 2, 32) == cuda.v_shape(10, 2, 32) == (10, 16, 2, 32)
    rocm = KvLayout.parse("HND:64:fp32:packed4")
    assert rocm.k_shape(10, 2, 32) == (10, 2, 8, 64, 4)
    assert rocm.v_shape(10, 2, 32) == (10, 2, 64, 32)
    assert rocm.describe() == "HND, block 64, fp32, K packed by 4"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nhd", "1 parts"),
        ("dhn:16:fp32", "'dhn'"),
        ("nhd:sixteen:fp32", "'sixteen'"),
        ("nhd:0:fp32", "1 to 4096"),
        ("nhd:16:fp64", "'fp64'"),
        ("nhd:16:fp32:packed4", "hnd"),
        ("hnd:16:fp32:4", "packed<x>"),
        ("hnd:16:fp32:packed0", "packed0"),
        ("hnd:16:fp32:packed-4", "'-4'"),
    ],
)
def test_a_bad_layout_is_refused_with_the_part_named(text: str, named: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        KvLayout.parse(text)
    assert named in refused.value.text
    assert repr(text.lower()) in refused.value.text.lower()
    assert refused.value.param == "kv_layout"


def test_a_packing_that_does_not_divide_the_head_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="head_dim 30"):
        KvLayout.parse("hnd:64:fp32:packed4").k_shape(1, 2, 30)
