"""The reference engine computes what the model's formulas say, for every family and through every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus_shared.engines.config import EngineConfig, EngineKind
from isthmus_shared.engines.factory import create_engine
from isthmus_shared.engines.reference.model_config import read_model_config
from isthmus_shared.errors import ConfigInvalid
from isthmus_testing.engines import ask, hand_over, running
from isthmus_testing.naive_model import CONFIGS, naive_logprobs, write_config, write_folder

SECOND_SHARD = "model-00002-of-00002.safetensors"
TOLERANCE = 2e-4  # fp32 against fp64


def config_of(folder: Path, layout: str = "nhd:16:fp32", **fields: object) -> EngineConfig:
    return EngineConfig(
        kind=EngineKind.REFERENCE,
        model_path=folder,
        model_name="m",
        kv_layout=layout,
        kv_blocks=32,
        **fields,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", list(CONFIGS))
async def test_tokens_and_logprobs_are_those_of_a_naive_dense_model(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    weights = write_folder(tmp_path, config)
    prompt = [(i * 37 + 11) % config["vocab_size"] for i in range(45)]
    producer = create_engine(config_of(tmp_path, "nhd:16:fp32", prefill_chunk_tokens=17))
    consumer = create_engine(config_of(tmp_path, "hnd:64:fp32:packed4"))
    async with running(producer) as a, running(consumer) as b:
        for outcome in (await a.run(ask("whole", prompt)), await hand_over(a, b, "split", prompt)):
            tokens = list(prompt)
            for token, entry in zip(outcome.tokens, outcome.logprobs, strict=True):
                wanted = naive_logprobs(config, weights, tokens)
                assert token == int(np.argmax(wanted))
                assert abs(entry.logprob - wanted[token]) < TOLERANCE
                assert [t for t, _ in entry.top] == [int(t) for t in np.argsort(-wanted)[:3]]
                tokens.append(token)


async def test_two_folders_of_other_weights_have_other_fingerprints(tmp_path: Path) -> None:
    async def fingerprint(name: str, seed: int) -> str:
        write_folder(tmp_path / name, CONFIGS["llama"], seed=seed)
        async with running(create_engine(config_of(tmp_path / name))) as engine:
            return engine.info.model_fingerprint

    assert await fingerprint("a", 1) == await fingerprint("b", 1) != await fingerprint("c", 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"sliding_window": 64}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"head_dim": 15}, "head_dim"),
    ],
)
def test_a_model_that_cannot_be_computed_is_refused_by_key(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    write_config(tmp_path, CONFIGS["llama"] | changes)
    with pytest.raises(ConfigInvalid, match=named):
        read_model_config(tmp_path)


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def half_a_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def no_second_shard(folder: Path) -> None:
    (folder / SECOND_SHARD).unlink()


def noise_for_a_shard(folder: Path) -> None:
    (folder / SECOND_SHARD).write_bytes(b"x" * 64)


def a_layer_too_few(folder: Path) -> None:
    write_folder(folder, CONFIGS["llama"] | {"num_hidden_layers": 2})
    write_config(folder, CONFIGS["llama"])


def another_size(folder: Path) -> None:
    write_folder(folder, CONFIGS["llama"] | {"hidden_size": 96})
    write_config(folder, CONFIGS["llama"])


def an_index_that_leaves_the_folder(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.safetensors"}}')


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (no_config, "config.json"),
        (half_a_config, "config.json"),
        (no_second_shard, SECOND_SHARD),
        (noise_for_a_shard, SECOND_SHARD),
        (a_layer_too_few, "layers.2"),
        (another_size, "shape"),
        (an_index_that_leaves_the_folder, "not a file of its folder"),
    ],
)
async def test_a_damaged_folder_is_refused_with_the_part_named(
    tmp_path: Path, damage: Callable[[Path], None], named: str
) -> None:
    write_folder(tmp_path, CONFIGS["llama"])
    damage(tmp_path)
    engine = create_engine(config_of(tmp_path))
    with pytest.raises(ConfigInvalid, match=named):
        await engine.start()
    await engine.stop()


async def test_a_kv_cache_in_bf16_is_handed_over_to_the_bit(tmp_path: Path) -> None:
    write_folder(tmp_path, CONFIGS["qwen3"])
    prompt = list(range(70))

    first, second = (create_engine(config_of(tmp_path, layout)) for layout in ("nhd:16:bf16", "hnd:32:bf16:packed8"))
    async with running(first) as a, running(second) as b:
        wanted, got = await a.run(ask("whole", prompt)), await hand_over(a, b, "split", prompt)
        assert got.tokens == wanted.tokens
        assert got.logprobs == wanted.logprobs
