"""The engines that the contract is tested with: `reference` and `sim`, or with ``--engines vllm`` that one."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from isthmus_shared.engines.config import EngineConfig, EngineKind, SimConfig, SimCosts
from isthmus_shared.engines.factory import create_engine
from isthmus_shared.engines.reference.checkpoint import ensure_tiny_checkpoint
from isthmus_shared.engines.vllm.engine import VllmEngine
from isthmus_testing.engines import Harness, Make, running
from isthmus_testing.tiny_checkpoints import Family, write_tiny_checkpoint

FORMS = {
    "reference-nhd": (EngineKind.REFERENCE, "nhd:16:fp32"),
    "reference-hnd-packed": (EngineKind.REFERENCE, "hnd:64:fp32:packed4"),
    "sim": (EngineKind.SIM, "nhd:16:fp32"),
}
PAIRS = (
    ("reference-nhd", "reference-hnd-packed"),
    ("reference-hnd-packed", "reference-nhd"),
    ("sim", "sim"),
)
VLLM_FAMILIES = (Family.LLAMA, Family.QWEN3)
"""Those that the reference engine computes too."""
VLLM_BLOCK_TOKENS = 32
FAST_SIM = SimConfig(
    costs=SimCosts(
        prefill_base_s=1e-4,
        prefill_token_s=1e-7,
        decode_base_s=1e-4,
        decode_sequence_s=1e-7,
        decode_resident_token_s=0,
    )
)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make(form, **config) starts an engine of that form, or a reference engine of that layout."""
    if request.config.getoption("engines") == "vllm":
        return _make_vllm(tmp_path_factory.mktemp("models"))
    tiny_folder = request.getfixturevalue("tiny_folder")

    def start(form: str, **config: object) -> AbstractAsyncContextManager[Harness]:
        kind, layout = FORMS.get(form, (EngineKind.REFERENCE, form))
        fields: dict[str, object] = {"kv_layout": layout, "sim": FAST_SIM, "prefill_chunk_tokens": 128} | config
        path = tiny_folder if kind is EngineKind.REFERENCE else None
        return running(create_engine(EngineConfig(kind=kind, model_name="tiny", model_path=path, **fields)))

    return start


def _make_vllm(models: Path) -> Make:
    """For the forms ``vllm-llama`` and so on, and ``reference-llama`` of the same checkpoint."""
    from isthmus_testing.vllm_in_process import CorePool

    pool = CorePool()

    def start(form: str, **config: object) -> AbstractAsyncContextManager[Harness]:
        engine, _, family = form.partition("-")
        folder = write_tiny_checkpoint(models / family, Family(family))
        fields: dict[str, object] = {"model_name": family, "model_path": folder, "prefill_chunk_tokens": 128} | config
        if engine == "reference":
            fields = {"kind": EngineKind.REFERENCE, "kv_layout": "hnd:64:fp32:packed4"} | fields
            return running(create_engine(EngineConfig.model_validate(fields)))
        blocks = config.get("kv_blocks")
        limit = 8192 if blocks is None else int(str(blocks)) * VLLM_BLOCK_TOKENS
        arguments = {"dtype": "float32", "enforce_eager": True, "block_size": VLLM_BLOCK_TOKENS, "max_model_len": limit}
        if blocks is None:
            arguments["kv_cache_memory_bytes"] = 32 << 20
        fields = {"kind": EngineKind.VLLM, "vllm_args": json.dumps(arguments)} | fields
        return running(VllmEngine(EngineConfig.model_validate(fields), pool.build))

    return start


@pytest.fixture(scope="session")
def tolerance(request: pytest.FixtureRequest) -> float:
    """Of logprobs: between two implementations they differ in the last bits of fp32."""
    return 5e-4 if request.config.getoption("engines") == "vllm" else 1e-5


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    with_vllm = metafunc.config.getoption("engines") == "vllm"
    if "producer" in metafunc.fixturenames:
        pairs: list[tuple[str, str]] = list(PAIRS)
        if with_vllm:
            pairs = [("vllm-llama", "vllm-llama")]
            for family in VLLM_FAMILIES:
                pairs += [(f"vllm-{family}", f"reference-{family}"), (f"reference-{family}", f"vllm-{family}")]
        metafunc.parametrize(("producer", "consumer"), pairs)
    elif "form" in metafunc.fixturenames:
        metafunc.parametrize("form", ["vllm-llama"] if with_vllm else list(FORMS))
