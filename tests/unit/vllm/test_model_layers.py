"""vLLM's cache groups as a KV shape, and what is refused."""

from __future__ import annotations

import pytest
import torch

from isthmus_kvrelay.client.vllm.backends import form_of, untested
from isthmus_kvrelay.client.vllm.model_layers import group_tables, kv_shape, layer_number, read_layers
from isthmus_kvrelay.client.vllm.settings import ConnectorSettings
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.kv import form as forms
from isthmus_shared.kv.manifest import KvDtype
from isthmus_shared.kv.shape import GroupShape
from isthmus_testing.vllm_parts import (
    FINGERPRINT,
    FullAttentionSpec,
    Group,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    layer_name,
)


def test_groups_of_the_shape_are_by_window_in_order_of_their_first_layer() -> None:
    """vLLM has the sliding layers in group 0; the shape is the reference engine's for the same model."""
    groups = [
        Group([layer_name(1), layer_name(3)], SlidingWindowSpec()),
        Group([layer_name(0), layer_name(2)], FullAttentionSpec()),
    ]
    shape = kv_shape(read_layers(groups), fingerprint=FINGERPRINT, tp_size=1, kv_heads_total=2)
    assert shape.dtype is KvDtype.FP32
    assert shape.groups == (GroupShape((0, 2), 2, 8), GroupShape((1, 3), 2, 8, 32))
    assert [(table.block_tokens, table.window_tokens) for table in group_tables(groups)] == [(16, 32), (16, None)]


def test_without_the_hybrid_manager_the_window_is_a_field_of_full_attention() -> None:
    groups = [Group([layer_name(0), layer_name(1)], FullAttentionSpec(sliding_window=32))]
    assert {layer.window_tokens for layer in read_layers(groups)} == {32}


def test_a_latent_has_one_head_on_every_rank() -> None:
    groups = [Group([layer_name(0)], MLAAttentionSpec(head_size=576))]
    shape = kv_shape(read_layers(groups), fingerprint=FINGERPRINT, tp_size=4, kv_heads_total=128)
    assert shape.groups == (GroupShape((0,), 1, 576, latent=True),)


def test_heads_are_those_of_all_ranks() -> None:
    groups = [Group([layer_name(0)], FullAttentionSpec(num_kv_heads=2))]
    shape = kv_shape(read_layers(groups), fingerprint=FINGERPRINT, tp_size=4, kv_heads_total=8)
    assert shape.groups[0].kv_heads == 8
    with pytest.raises(ConfigInvalid, match="2 KV heads"):
        kv_shape(read_layers(groups), fingerprint=FINGERPRINT, tp_size=2, kv_heads_total=8)


@pytest.mark.parametrize(
    ("group", "named"),
    [
        (Group([layer_name(0)], MambaSpec()), "MambaSpec"),
        (Group([layer_name(0)], FullAttentionSpec(dtype=torch.uint8)), "uint8"),
        (Group([layer_name(0)], FullAttentionSpec(head_size_v=4)), "V of 4"),
        (Group([layer_name(0), "draft.layers.0.attn"]), "is that of"),
        (Group(["model.layers.0.blocks.1.attn"]), "2 numbers"),
        (Group(["attn"]), "0 numbers"),
        (Group([]), "no KV cache"),
    ],
)
def test_what_cannot_be_transferred_is_refused_at_the_start(group: Group, named: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        read_layers([group])
    assert named in refused.value.text


def test_a_quantized_cache_is_refused() -> None:
    spec = FullAttentionSpec()
    spec.kv_quant_mode = 1  # type: ignore[attr-defined]
    with pytest.raises(ConfigInvalid, match="quantized"):
        read_layers([Group([layer_name(0)], spec)])


def test_numbers_inside_words_do_not_count() -> None:
    assert layer_number("model.layers.11.h2o.attn") == 11


def test_forms_by_backend() -> None:
    assert form_of("CPU_ATTN", {}) is forms.CPU_ATTN
    assert form_of("ROCM_AITER_FA", {}) is forms.CONTENT
    assert form_of("ROCM_AITER_FA", {"VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "True"}) is forms.SHUFFLE
    with pytest.raises(ConfigInvalid, match="AMX"):
        form_of("CPU_ATTN", {}, amx=True)
    with pytest.raises(ConfigInvalid, match="MAMBA2"):
        form_of("MAMBA2", {})


def test_untested_versions_are_told() -> None:
    assert untested("0.32.0") is None
    assert untested("0.33.1+cpu") is None
    assert "0.34.0 is untested" in (untested("0.34.0") or "")
    assert untested("0.3.2") is not None
    assert untested("0.320.0") is not None


def test_bad_settings_are_refused_by_name() -> None:
    assert ConnectorSettings.read({"relay_socket": "/r"}).deadline_s == 120
    for extra, named in (
        ({}, "relay_socket"),
        ({"relay_socket": "/r", "deadline": 3}, "deadline"),
        ({"relay_socket": "/r", "deadline_s": "soon"}, "deadline_s"),
        ({"relay_socket": "/r", "model_fingerprint": "abc"}, "model_fingerprint"),
    ):
        with pytest.raises(ConfigInvalid) as refused:
            ConnectorSettings.read(extra)
        assert refused.value.param == named
