from __future__ import annotations

import pytest

from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.kv.layout import KvLayout
from isthmus_shared.kv.manifest import KvDtype
from isthmus_shared.kv.profiles import PROFILES


def test_the_two_demo_layouts_have_their_vendors_shapes() -> None:
    cuda = KvLayout.parse("nhd:16:fp32")
    assert cuda.tensor_shapes(10, 2, 32) == ((10, 16, 2, 32), (10, 16, 2, 32))
    rocm = KvLayout.parse("HND:64:fp32:packed4")
    assert rocm.tensor_shapes(10, 2, 32) == ((10, 2, 8, 64, 4), (10, 2, 64, 32))
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
        ("cpu:0:bf16", "1 to 4096"),
        ("cpu:fp64", "'fp64'"),
        ("cpu:1x", "'1x'"),
        ("cpu:32:fp32:4", "4 parts"),
        ("tpu", "no vendor's profile"),
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
        KvLayout.parse("hnd:64:fp32:packed4").tensor_shapes(1, 2, 30)


def test_a_vendors_profile_is_named_and_may_be_varied() -> None:
    shuffle = KvLayout.parse("amd-shuffle")
    assert (shuffle.block_tokens, shuffle.dtype) == (16, KvDtype.BF16)
    assert shuffle.tensor_shapes(10, 2, 32) == ((10, 2 * 16 * 2 * 32),)
    assert shuffle.describe() == "amd-shuffle, block 16, bf16"
    varied = KvLayout.parse("cpu:32:fp32")
    assert varied == KvLayout.parse("CPU:fp32:32") == KvLayout.parse(str(varied))
    assert varied.tensor_shapes(10, 2, 64) == ((10, 2, 2 * 32 * 64),)
    for name in PROFILES:
        assert KvLayout.parse(str(KvLayout.parse(name))) == KvLayout.parse(name)


def test_runs_that_do_not_divide_the_block_are_refused() -> None:
    with pytest.raises(ConfigInvalid, match="block size 24 is not a multiple of 16"):
        KvLayout.parse("amd-shuffle:24:fp8_e4m3fn").tensor_shapes(1, 2, 32)
