"""The engines that the contract is tested with."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from isthmus_shared.engines.config import EngineConfig, EngineKind, SimConfig, SimCosts
from isthmus_shared.engines.factory import create_engine
from isthmus_shared.engines.reference.checkpoint import ensure_tiny_checkpoint
from isthmus_testing.engines import Harness, Make, running

FORMS = {
    "reference-nhd": (EngineKind.REFERENCE, "nhd:16:fp32"),
    "reference-hnd-packed": (EngineKind.REFERENCE, "hnd:64:fp32:packed4"),
    "sim": (EngineKind.SIM, "nhd:16:fp32"),
}
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
def make(tiny_folder: Path) -> Make:
    """make(form, **config) starts an engine of that form, or a reference engine of that layout."""

    def start(form: str, **config: object) -> AbstractAsyncContextManager[Harness]:
        kind, layout = FORMS.get(form, (EngineKind.REFERENCE, form))
        fields: dict[str, object] = {"kv_layout": layout, "sim": FAST_SIM, "prefill_chunk_tokens": 128} | config
        path = tiny_folder if kind is EngineKind.REFERENCE else None
        return running(create_engine(EngineConfig(kind=kind, model_name="tiny", model_path=path, **fields)))

    return start


@pytest.fixture(params=list(FORMS))
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)
