from __future__ import annotations

import pytest
from pydantic import ValidationError

from isthmus_shared.errors import ManifestMismatch
from isthmus_shared.kv.manifest import KvDtype, KvManifest, KvScales, ScaleKind
from isthmus_shared.kv.negotiate import kv_form, require_exchangeable
from isthmus_shared.kv.shape import GroupShape, KvShape, first_visible_token, group_layers


def shape(**changes: object) -> KvShape:
    fields: dict[str, object] = {"windows": (None, 128, None), "kv_heads": 2, "head_dim": 32}
    groups = fields | {key: value for key, value in changes.items() if key in fields}
    return KvShape(
        model_fingerprint=str(changes.get("fingerprint", "f1")),
        dtype=KvDtype(str(changes.get("dtype", "fp32"))),
        groups=group_layers(**groups),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("changes", "field", "values"),
    [
        ({"fingerprint": "f2"}, "model_fingerprint", ("f1", "f2")),
        ({"dtype": "bf16"}, "dtype", ("fp32", "bf16")),
        ({"windows": (None, None, None)}, "number of groups", ("2", "1")),
        ({"windows": (None, 64, None)}, "groups.1.window_tokens", ("128", "64")),
        ({"windows": (128, None, None)}, "groups.0.kind", ("full", "sliding")),
        ({"kv_heads": 4}, "groups.0.kv_heads", ("2", "4")),
        ({"head_dim": 64}, "groups.0.head_dim", ("32", "64")),
    ],
)
def test_a_difference_is_named_with_both_values(
    changes: dict[str, object], field: str, values: tuple[str, str]
) -> None:
    ours, theirs = shape().manifest(300), shape(**changes).manifest(300)
    with pytest.raises(ManifestMismatch) as refused:
        require_exchangeable(ours, theirs)
    assert refused.value.param == field
    assert f"here {values[0]}, there {values[1]}" in refused.value.why
    assert kv_form(ours) != kv_form(theirs)


def test_another_prompt_length_is_no_match_but_the_same_form() -> None:
    ours, theirs = shape().manifest(300), shape().manifest(301)
    with pytest.raises(ManifestMismatch, match="prompt_tokens"):
        require_exchangeable(ours, theirs)
    assert kv_form(ours) == kv_form(theirs)


def test_equal_manifests_pass_also_after_the_wire() -> None:
    ours = shape().manifest(300)
    require_exchangeable(ours, KvManifest.model_validate(ours.model_dump(mode="json")))


def test_a_sliding_group_carries_what_the_last_prompt_token_sees() -> None:
    """The token at position 299 with a window of 128 sees itself and 172 to 298."""
    full, sliding = shape().manifest(300).groups
    assert (full.layer_ids, full.token_start, full.token_end) == ((0, 2), 0, 300)
    assert (sliding.layer_ids, sliding.token_start, sliding.token_end) == ((1,), 172, 300)
    assert shape().manifest(128).groups[1].token_start == 0
    assert first_visible_token(50, 1) == 50


def test_layers_of_one_window_are_one_group() -> None:
    assert group_layers((8, None, 8), kv_heads=1, head_dim=4) == (
        GroupShape((0, 2), 1, 4, 8),
        GroupShape((1,), 1, 4, None),
    )


def fp8(dtype: KvDtype = KvDtype.FP8_E4M3FN, scales: KvScales | None = None, heads: int = 2) -> KvManifest:
    return KvShape("f1", dtype, (GroupShape((0, 1), heads, 32, scales=scales),)).manifest(100)


def per_tensor(*values: float) -> KvScales:
    return KvScales(kind=ScaleKind.TENSOR, k=values[:2], v=values[2:])


NUZ = KvDtype.FP8_E4M3FNUZ
BLOCKS = {size: KvScales(kind=ScaleKind.BLOCK, block_tokens=size) for size in (16, 32, 48)}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (fp8(scales=per_tensor(1, 2, 3, 4)), fp8(NUZ, scales=per_tensor(2, 4, 6, 8))),
        (fp8(), fp8(scales=per_tensor(1, 1, 1, 1))),
        (fp8(NUZ, per_tensor(2, 2, 2, 2)), fp8()),
        (
            fp8(scales=KvScales(kind=ScaleKind.HEAD, k=(1, 1, 2, 2), v=(3, 3, 4, 4))),
            fp8(NUZ, per_tensor(2, 4, 6, 8)),
        ),
        (fp8(scales=BLOCKS[16]), fp8(NUZ, scales=BLOCKS[16])),
    ],
)
def test_fp8_flavours_are_convertible_when_scales_mean_the_same(ours: KvManifest, theirs: KvManifest) -> None:
    for one, other in ((ours, theirs), (theirs, ours)):
        require_exchangeable(one, KvManifest.model_validate_json(other.model_dump_json()))
    assert kv_form(ours) == kv_form(theirs)


@pytest.mark.parametrize(
    ("ours", "theirs", "field", "values"),
    [
        (fp8(), fp8(NUZ), "groups.0.scales", ("fp8_e4m3fn 1.0", "fp8_e4m3fnuz 1.0")),
        (fp8(scales=per_tensor(1, 2, 3, 4)), fp8(scales=per_tensor(1, 2, 3, 5)), "groups.0.scales", ("4.0", "5.0")),
        (fp8(), fp8(scales=BLOCKS[16]), "groups.0.scales.kind", ("none", "block")),
        (fp8(scales=BLOCKS[32]), fp8(scales=BLOCKS[16]), "groups.0.scales.block_tokens", ("32", "16")),
        (fp8(scales=BLOCKS[32]), fp8(scales=BLOCKS[48]), "groups.0.scales.block_tokens", ("32", "48")),
        (fp8(), shape(windows=(None, None)).manifest(100), "dtype", ("fp8_e4m3fn", "fp32")),
    ],
)
def test_fp8_that_would_change_is_refused(
    ours: KvManifest, theirs: KvManifest, field: str, values: tuple[str, str]
) -> None:
    with pytest.raises(ManifestMismatch) as refused:
        require_exchangeable(ours, theirs)
    assert refused.value.param == field
    assert all(value in refused.value.why for value in values)
    assert refused.value.todo
    assert kv_form(ours) != kv_form(theirs)


def test_smaller_blocks_of_scales_may_take_larger_ones() -> None:
    require_exchangeable(fp8(scales=BLOCKS[16]), fp8(scales=BLOCKS[48]))


def test_a_shard_is_exchanged_for_the_same_shard_only() -> None:
    whole = KvShape("f1", KvDtype.BF16, (GroupShape((0,), 8, 32),))
    shards = [whole.narrow_heads(start, 4).manifest(10) for start in (0, 4)]
    require_exchangeable(shards[1], whole.narrow_heads(4, 4).manifest(10))
    for one, other, field in (
        (shards[0], shards[1], "groups.0.head_start"),
        (shards[0], whole.manifest(10), "groups.0.kv_heads"),
        (
            whole.narrow_heads(0, 4).manifest(10),
            KvShape("f1", KvDtype.BF16, (GroupShape((0,), 4, 32),)).manifest(10),
            "groups.0.model_heads",
        ),
    ):
        with pytest.raises(ManifestMismatch) as refused:
            require_exchangeable(one, other)
        assert refused.value.param == field
        assert kv_form(one) != kv_form(other)


def test_a_form_of_the_future_is_refused() -> None:
    ours = shape().manifest(300)
    with pytest.raises(ManifestMismatch, match="version") as refused:
        require_exchangeable(ours, ours.model_copy(update={"version": 3}))
    assert "here up to 2, there 3" in refused.value.why


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 1}, "version 1 cannot express it"),
        ({"dtype": "bf16"}, "has scales"),
        ({"prompt_tokens": 99}, "ends at token 100"),
        ({"groups": "twice"}, "twice"),
        ({"scales": {"kind": "tensor", "k": [1.0], "v": [1.0, 1.0]}}, "1 scales of K and 2 of V"),
        ({"scales": {"kind": "head", "k": [1.0] * 4, "v": [1.0] * 2}}, "where 4 a part belong"),
        ({"scales": {"kind": "tensor", "k": [0.0, 1.0], "v": [1.0, 1.0]}}, "greater than 0"),
        ({"scales": {"kind": "tensor", "k": [float("inf"), 1.0], "v": [1.0, 1.0]}}, "finite"),
        ({"scales": {"kind": "block"}}, "block_tokens"),
        ({"scales": {"kind": "block", "block_tokens": 16, "k": [1.0]}}, "in the flow"),
        ({"kind": "latent"}, "a latent has one head"),
        ({"head_start": 1}, "more than the model's"),
        ({"token_end": 0}, "token_end"),
        ({"window_tokens": 5}, "sliding"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_none(change: dict[str, object], named: str) -> None:
    fields = fp8(scales=per_tensor(1, 2, 3, 4)).model_dump()
    KvManifest.model_validate(fields)
    for key, value in change.items():
        if value == "twice":
            fields["groups"] = fields["groups"] * 2
        elif key in fields:
            fields[key] = value
        else:
            fields["groups"][0][key] = value
    with pytest.raises(ValidationError, match=named):
        KvManifest.model_validate(fields)
