"""The checkpoints of known architectures: the same bytes everywhere, and read by the reference engine where it can."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from isthmus_shared.engines.config import EngineConfig, EngineKind
from isthmus_shared.engines.factory import create_engine
from isthmus_testing.engines import ask, prompt_of, running
from isthmus_testing.tiny_checkpoints import Family, write_tiny_checkpoint

DIGESTS = {
    Family.LLAMA: "179850c59ad021df",
    Family.QWEN3: "0f84be7edd1fdf07",
    Family.GPT_OSS: "b4be68af810aae31",
    Family.DEEPSEEK_V3: "b196e4934f50492c",
}


@pytest.mark.parametrize("family", list(Family))
def test_a_checkpoint_is_the_same_on_every_machine(tmp_path: Path, family: Family) -> None:
    folder = write_tiny_checkpoint(tmp_path / family.value, family)
    assert json.loads((folder / "config.json").read_text())["model_type"] == family.value.replace("-", "_")
    tensors = load_file(folder / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].shape}".encode() + tensors[name].tobytes())
    assert digest.hexdigest()[:16] == DIGESTS[family]
    parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
    assert 2e6 < parameters < 5e6


@pytest.mark.parametrize("family", [Family.LLAMA, Family.QWEN3])
async def test_the_reference_engine_computes_it(tmp_path: Path, family: Family) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", family)
    config = EngineConfig(kind=EngineKind.REFERENCE, model_path=folder, model_name="m", kv_blocks=32)
    async with running(create_engine(config)) as engine:
        one = await engine.run(ask("one", prompt_of(40, seed=1), max_tokens=16))
        other = await engine.run(ask("other", (*prompt_of(40, seed=1)[:-1], 7), max_tokens=16))
        assert len(set(one.tokens)) > 4
        assert one.tokens != other.tokens
