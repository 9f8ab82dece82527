"""What the operator writes becomes vLLM's arguments, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus_shared.engines.config import EngineConfig, EngineKind
from isthmus_shared.engines.vllm.arguments import engine_arguments, parse
from isthmus_shared.errors import ConfigInvalid

KNOWN = (
    "model",
    "dtype",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "enable_prefix_caching",
    "compilation_config",
    "kv_transfer_config",
    "tensor_parallel_size",
    "num_gpu_blocks_override",
)


def config(text: str = "", **fields: Any) -> EngineConfig:
    return EngineConfig(kind=EngineKind.VLLM, model_name="m", vllm_args=text, **fields)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", {}),
        ('{"dtype": "float32", "max-num-seqs": 8}', {"dtype": "float32", "max_num_seqs": 8}),
        ("--dtype float32 --max-num-seqs=8", {"dtype": "float32", "max_num_seqs": 8}),
        ("--enable-prefix-caching --dtype half", {"enable_prefix_caching": True, "dtype": "half"}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("""--compilation-config '{"mode": 0}'""", {"compilation_config": {"mode": 0}}),
    ],
)
def test_both_forms_give_the_same_arguments(text: str, wanted: dict[str, Any]) -> None:
    assert engine_arguments(config(text), KNOWN) == wanted


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ("dtype=float32", "neither a JSON object"),
        ("--dtype 'float32", "quotes"),
        ("--dtype float32 half", "'half' belongs to no option"),
        ("--dtype a --dtype b", "given twice"),
        ("--max-num-sequences 4", "did you mean max_num_seqs"),
        ('{"qqq": 1}', "vllm serve --help"),
        ("--model other", "ISTHMUS_ENGINE_MODEL"),
        ("--kv-transfer-config {}", "kv_transfer_config is not yours"),
        ("--tensor-parallel-size 2", "docs/vllm.md"),
    ],
)
def test_what_cannot_be_passed_on_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(ConfigInvalid, match=named) as refused:
        engine_arguments(config(text), KNOWN)
    assert "ISTHMUS_ENGINE_VLLM_ARGS" in refused.value.text
    assert refused.value.param == "vllm_args"


def test_tensor_parallel_size_one_is_as_good_as_none() -> None:
    assert engine_arguments(config("--tensor-parallel-size 1"), KNOWN) == {"tensor_parallel_size": 1}


def test_the_workers_own_settings_are_passed_on_only_where_they_were_given() -> None:
    assert engine_arguments(config(max_batch=4), KNOWN) == {"max_num_seqs": 4}
    assert engine_arguments(config(prefill_chunk_tokens=512), KNOWN) == {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
    }
    assert engine_arguments(config(kv_blocks=9, kv_cache_bytes=1 << 20), KNOWN) == {
        "num_gpu_blocks_override": 10,
        "kv_cache_memory_bytes": 1 << 20,
    }


def test_a_chunk_below_the_batch_still_leaves_each_sequence_its_token() -> None:
    assert engine_arguments(config(prefill_chunk_tokens=4, max_batch=8), KNOWN) == {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8,
        "long_prefill_token_threshold": 4,
    }


def test_a_thing_that_is_set_twice_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="max_num_seqs is set twice"):
        engine_arguments(config("--max-num-seqs 8", max_batch=4), KNOWN)


def test_names_are_given_with_dashes_or_underscores() -> None:
    assert parse('{"a-b": 1}') == parse("--a-b 1") == parse("--a_b 1") == {"a_b": 1}
