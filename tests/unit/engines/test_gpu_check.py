"""The check for GPUs runs on machines without one as far as it can, and says what it leaves out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from isthmus_shared.engines.config import EngineConfig, EngineKind
from isthmus_shared.engines.factory import create_engine
from isthmus_shared.errors import ConfigInvalid
from isthmus_testing.tiny_checkpoints import Family, write_tiny_checkpoint

SCRIPT = Path(__file__).parents[3] / "tools" / "gpu_check.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_every_vendors_form_comes_back_bit_for_bit() -> None:
    done = run("--device", "cpu", "--only", "forms")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("PASSED   forms:")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_without_a_gpu_it_says_what_it_would_check() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[:3] for line in done.stdout.splitlines()] == [
        ["NOT", "RUN", "forms:"],
        ["NOT", "RUN", "reference:"],
        ["NOT", "RUN", "vllm:"],
    ]
    assert "it would check a cluster" in done.stdout


async def test_a_device_that_torch_has_not_got_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", Family.LLAMA)
    config = EngineConfig(kind=EngineKind.REFERENCE, model_name="m", model_path=folder, device="cuda:77")
    with pytest.raises(ConfigInvalid, match="cuda:77"):
        await create_engine(config).start()
