from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from isthmus_planner.cost import catalog, memory
from isthmus_planner.cost.constants import Constants
from isthmus_planner.cost.hf_config import model_from_hf
from isthmus_planner.cost.laws import decode_law, prefill_law
from isthmus_planner.cost.layout import Layout, Precision
from isthmus_shared.errors import ConfigInvalid
from isthmus_testing import hf_configs

PUBLISHED = {
    "gpt-oss-120b": hf_configs.GPT_OSS_120B,
    "gpt-oss-20b": hf_configs.GPT_OSS_20B,
    "deepseek-r1": hf_configs.DEEPSEEK_R1,
    "llama-3.3-70b": hf_configs.LLAMA_3_3_70B,
    "qwen3-235b-a22b": hf_configs.QWEN3_235B_A22B,
}


@pytest.mark.parametrize("name", catalog.accelerators())
def test_every_figure_of_an_accelerator_names_its_source(name: str) -> None:
    profile = catalog.accelerator(name)
    figures = ("bf16_flop_per_s", "memory_bytes", "memory_bytes_per_s", "nic_bits_per_s", "price_usd_per_h")
    assert all(profile.sources[figure] for figure in figures)


def test_the_accelerators_are_those_that_were_promised() -> None:
    assert set(catalog.accelerators()) == {
        "h100", "h200", "b200", "b300", "mi300x", "mi308x", "mi325x", "mi355x",
        "vr200", "rubin-cpx", "n300", "p150", "groq-3-lpx",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "params_b", "active_b", "weights_gb"),
    [
        ("gpt-oss-120b", 116.83, 5.13, 60.9 + 3.1 + 1.16),
        ("gpt-oss-20b", 20.9, 3.61, 12.6 + 1.16),
        ("deepseek-r1", 671, 36.6, 671),
        ("llama-3.3-70b", 70.6, 69.5, 70.6),
        ("qwen3-235b-a22b", 235, 21.6, 235),
    ],
)
def test_models_have_the_published_size(name: str, params_b: float, active_b: float, weights_gb: float) -> None:
    profile = catalog.model(name)
    assert profile.params / 1e9 == pytest.approx(params_b, rel=2e-3)
    assert profile.active_params / 1e9 == pytest.approx(active_b, rel=2e-3)
    assert profile.stored_bytes(Layout()) / 1e9 == pytest.approx(weights_gb, rel=5e-3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_profile_says_what_the_models_own_config_says(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    ours, theirs = catalog.model(name), catalog.model(str(tmp_path))
    for field in (
        "full_layers", "window_layers", "window_tokens", "hidden", "heads", "kv_heads", "head_dim", "experts",
        "experts_per_token", "dense_params", "expert_params", "embedding_params", "mla", "max_context_tokens",
    ):  # fmt: skip
        assert getattr(ours, field) == getattr(theirs, field), field
    layout = Layout(weights=ours.precision)
    assert ours.stored_bytes(layout) == theirs.stored_bytes(layout)


def test_a_dense_decoder_is_read_from_its_config() -> None:
    profile = model_from_hf("qwen3-8b", hf_configs.QWEN3_8B)
    assert profile.params / 1e9 == pytest.approx(8.19, rel=0.01)
    assert (profile.experts, profile.expert_params, profile.precision) == (0, 0, Precision.BF16)
    accelerator = catalog.accelerator("h100")
    law = decode_law(accelerator, profile, Layout(), Constants())
    assert law.a_s(2) - law.a_s(1) == pytest.approx(Constants().sequence_s)
    assert prefill_law(accelerator, profile, Layout(), Constants()).time_s(100) > 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_hidden_layers": -3}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "layers"),
        ({"num_attention_heads": 0, "head_dim": 0}, "heads"),
        ({"quantization_config": {"quant_method": "gguf"}}, "gguf"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["mamba"] * 36}, "mamba"),
        ({"model_type": "jamba", "num_experts": 16}, "num_experts"),
        ({"model_type": 7}, "model_type"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigInvalid, match=named):
        model_from_hf("some-model", {**hf_configs.QWEN3_8B, **change})


def test_an_unknown_figure_stops_only_what_needs_it() -> None:
    rubin, oss = catalog.accelerator("vr200"), catalog.model("gpt-oss-120b")
    assert decode_law(rubin, oss, Layout(tp=2), Constants()).step_s(1, 100) > 0
    assert memory.fit(rubin, oss, Layout()).kv_tokens > 0
    llama = catalog.model("llama-3.3-70b")
    with pytest.raises(
        ConfigInvalid, match=r"fp8_flop_per_s of accelerator 'vr200', which is unknown.*profile of your"
    ):
        prefill_law(rubin, llama, Layout(), Constants())


def test_weights_in_a_format_without_arithmetic_are_unpacked_into_bf16() -> None:
    h100 = catalog.accelerator("h100")
    assert h100.peak_flop_per_s(Precision.FP4) == 989e12
    assert h100.peak_flop_per_s(Precision.FP8) == 1979e12
    assert catalog.accelerator("b200").peak_flop_per_s(Precision.FP4) == 9000e12


def test_names_are_found_by_alias_and_unknown_ones_refused_with_the_known() -> None:
    assert catalog.accelerator(" H100-SXM ").name == "h100"
    assert catalog.model("openai/gpt-oss-120b").name == "gpt-oss-120b"
    with pytest.raises(ConfigInvalid, match=r"'h900' is not known; known are b200.*YAML file"):
        catalog.accelerator("h900")
    with pytest.raises(ConfigInvalid, match=r"'gpt-9' is not known.*deepseek-r1"):
        catalog.model("gpt-9")


OWN: dict[str, Any] = {
    "name": "mine",
    "vendor": "acme",
    "formats": ["bf16"],
    "figures": {"memory_bytes_per_s": {"value": 1.0e12, "source": "measured"}},
}


def test_an_operators_own_accelerator_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(OWN))
    profile = catalog.accelerator(str(path))
    assert (profile.memory_bytes_per_s, profile.memory_bytes) == (1e12, None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"figures": {"memory_bytes_per_s": {"value": -1.0, "source": "x"}}}, "memory_bytes_per_s = -1"),
        ({"figures": {"memory_bytes_per_s": {"value": 1.0}}}, "figures.memory_bytes_per_s.source"),
        ({"figures": {"bandwith": {"value": 1.0, "source": "x"}}}, "figures.bandwith"),
        ({"formats": []}, "formats"),
        ({"vendor": None}, "vendor"),
    ],
)
def test_a_wrong_profile_is_refused_by_field(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**OWN, **change}))
    with pytest.raises(ConfigInvalid, match=named):
        catalog.accelerator(str(path))


@pytest.mark.parametrize(("text", "why"), [("[1, 2]", "no mapping"), ("{", "not YAML"), (None, "cannot read")])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str | None, why: str) -> None:
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigInvalid, match=why):
        catalog.model(str(path))
