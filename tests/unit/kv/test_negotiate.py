from __future__ import annotations

import pytest

from isthmus_shared.errors import ManifestMismatch
from isthmus_shared.kv.manifest import KvDtype, KvManifest
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


def test_a_sliding_group_carries_what_the_first_decoded_token_sees() -> None:
    """A token at position 300 with a window of 128 sees itself and 173 to 299."""
    full, sliding = shape().manifest(300).groups
    assert (full.layer_ids, full.token_start, full.token_end) == ((0, 2), 0, 300)
    assert (sliding.layer_ids, sliding.token_start, sliding.token_end) == ((1,), 173, 300)
    assert shape().manifest(127).groups[1].token_start == 0
    assert first_visible_token(50, 1) == 49


def test_layers_of_one_window_are_one_group() -> None:
    assert group_layers((8, None, 8), kv_heads=1, head_dim=4) == (
        GroupShape((0, 2), 1, 4, 8),
        GroupShape((1,), 1, 4, None),
    )
