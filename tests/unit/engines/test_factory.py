from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import isthmus_shared
from isthmus_shared.engines.config import EngineConfig, EngineKind, SimCosts
from isthmus_shared.engines.factory import create_engine
from isthmus_shared.errors import ConfigInvalid

SIM_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from isthmus_shared.engines.config import EngineConfig
from isthmus_shared.engines.factory import create_engine
create_engine(EngineConfig(kind="sim", model_name="m"))
try:
    create_engine(EngineConfig(kind="reference", model_name="m", model_path="/nowhere"))
except Exception as error:
    assert type(error).__name__ == "ConfigInvalid" and "isthmus[torch]" in str(error), error
else:
    raise AssertionError("torch was imported")
"""


def test_sim_needs_no_torch_and_reference_says_that_it_does() -> None:
    source = str(Path(isthmus_shared.__file__).parent.parent)
    subprocess.run([sys.executable, "-c", SIM_WITHOUT_TORCH], check=True, env={"PYTHONPATH": source}, timeout=60)


def test_settings_that_cannot_hold_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="model folder"):
        create_engine(EngineConfig(kind=EngineKind.REFERENCE, model_name="m"))
    with pytest.raises(ConfigInvalid, match="KV layout"):
        create_engine(EngineConfig(kind=EngineKind.SIM, model_name="m", kv_layout="nhd"))


def test_a_step_costs_what_its_parts_cost() -> None:
    costs = SimCosts(
        prefill_base_s=1.0,
        prefill_token_s=0.1,
        decode_base_s=2.0,
        decode_sequence_s=0.01,
        decode_resident_token_s=0.001,
    )
    assert costs.step_s(prefill_tokens=0, decode_sequences=0, resident_tokens=0) == 0
    assert costs.step_s(prefill_tokens=10, decode_sequences=0, resident_tokens=0) == pytest.approx(2.0)
    assert costs.step_s(prefill_tokens=0, decode_sequences=3, resident_tokens=100) == pytest.approx(2.13)
    assert costs.step_s(prefill_tokens=10, decode_sequences=3, resident_tokens=100) == pytest.approx(4.13)
