"""Files that settings name: what is wrong with them is told at once, and what is doubtful is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from isthmus_ingress.config import IngressConfig
from isthmus_shared.errors import ConfigInvalid
from isthmus_testing.fake_cluster import say
from isthmus_testing.ingress import ingress_stack

KEY = "sk-acme-0123456789"


def tenants(folder: Path, **fields: str) -> Path:
    path = folder / "tenants.jsonl"
    path.write_text(json.dumps({"name": "acme", "key": KEY, **fields}))
    path.chmod(0o600)
    return path


def test_what_the_settings_name_is_looked_at_before_there_is_a_bus(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if "ISTHMUS" not in name and "NATS" not in name}
    environ |= {"NATS_URL": "nats://127.0.0.1:1", "ISTHMUS_INGRESS_MODEL": str(tmp_path / "none")}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "isthmus_ingress"], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "tokenizer.json does not exist" in done.stderr


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tenants": "noise"}, "noise.* cannot be had|is no tenant"),
        ({"slo_classes": "noise"}, "is no SLO class|cannot be had"),
        ({"model_name": "tiny", "models": ("other=noise",)}, "tokenizer.json does not exist"),
    ],
)
def test_each_of_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], said: str
) -> None:
    (tmp_path / "noise").write_text("noise")
    monkeypatch.chdir(tmp_path)
    IngressConfig(model=folder).check()
    with pytest.raises(ConfigInvalid, match=said):
        IngressConfig(model=folder, **settings).check()  # type: ignore[arg-type]


def test_a_tenant_of_a_class_that_is_not_in_the_file_of_classes_is_refused_too(folder: Path, tmp_path: Path) -> None:
    classes = tmp_path / "classes.jsonl"
    classes.write_text(json.dumps({"name": "batch", "ttft_s": 9.0}))
    with pytest.raises(ConfigInvalid, match="'gold', which does not exist"):
        IngressConfig(model=folder, tenants=tenants(tmp_path, slo_class="gold"), slo_classes=classes).check()


@pytest.mark.parametrize(
    ("mode", "slo_class", "warned"),
    [
        (0o600, "", []),
        (0o640, "", []),
        (0o644, "", ["tenants.readable_by_others"]),
        (0o600, "gold", ["tenants.classes_unknown"]),
    ],
)
async def test_what_is_doubtful_about_tenants_is_logged(
    folder: Path, tmp_path: Path, mode: int, slo_class: str, warned: list[str]
) -> None:
    path = tenants(tmp_path, **({"slo_class": slo_class} if slo_class else {}))
    path.chmod(mode)
    with capture_logs() as logged:
        async with ingress_stack(folder, "ok", settings={"tenants": path}, tokens=say("ok")):
            pass
    assert [line["event"] for line in logged if line["event"].startswith("tenants.")] == warned
    assert KEY not in str(logged)
