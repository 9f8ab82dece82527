"""What is generated matches the code, and the checks that say so can fail."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from isthmus_ingress.config import IngressConfig
from isthmus_kvrelay.daemon.config import RelayConfig
from isthmus_planner.config import PlannerConfig
from isthmus_shared.messages.catalog import CHANNELS, all_messages
from isthmus_worker.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[3]


def run(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / tool), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_the_schemas_match_the_messages() -> None:
    done = run("gen_schemas.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_page_matches_the_models() -> None:
    done = run("gen_config_docs.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_drift_of_schemas_is_found_and_says_what_to_run(tmp_path: Path) -> None:
    folder = tmp_path / "schemas"
    shutil.copytree(ROOT / "schemas", folder)
    (folder / "ack.json").write_text("{}")
    (folder / "cancel.json").unlink()
    (folder / "old_message.json").write_text("{}")
    done = run("gen_schemas.py", "--check", "--folder", str(folder))
    assert done.returncode == 1
    for part in ("make schemas", "ack.json: differs", "cancel.json: missing", "old_message.json: no such message"):
        assert part in done.stdout
    page = tmp_path / "messages.md"
    where = ("--folder", str(folder), "--page", str(page))
    assert run("gen_schemas.py", *where).returncode == 0
    assert run("gen_schemas.py", "--check", *where).returncode == 0
    page.write_text(page.read_text().replace("`transfer_id`", "`transfer`", 1))
    done = run("gen_schemas.py", "--check", *where)
    assert done.returncode == 1
    assert "messages.md: differs" in done.stdout


def test_the_message_page_has_every_message_field_and_its_meaning() -> None:
    page = (ROOT / "docs" / "messages.md").read_text()
    for kind, message in all_messages().items():
        section = page.partition(f"\n### {kind}\n")[2].partition("\n### ")[0]
        assert section, kind
        for field in message.model_fields:
            assert f"| `{field}` |" in section, f"{kind}.{field}"
    assert "None: aggregated; the worker prefills the prompt itself" in page
    for target in re.findall(r"\]\(#([^)]+)\)", page):
        assert re.search(rf"^### {target}$", page, re.MULTILINE | re.IGNORECASE), target


def test_drift_of_the_configuration_page_is_found(tmp_path: Path) -> None:
    page = tmp_path / "configuration.md"
    page.write_text("old")
    done = run("gen_config_docs.py", "--check", "--file", str(page))
    assert done.returncode == 1
    assert "make schemas" in done.stdout


def test_drift_of_the_example_environment_is_found(tmp_path: Path) -> None:
    example = tmp_path / ".env.example"
    example.write_text("old")
    done = run("gen_config_docs.py", "--check", "--env-file", str(example))
    assert done.returncode == 1
    assert ".env.example" in done.stdout


def test_the_example_environment_names_every_variable_that_the_compose_files_read() -> None:
    example = (ROOT / "compose" / ".env.example").read_text(encoding="utf-8")
    offered = set(re.findall(r"^#([A-Z][A-Z0-9_]*)=", example, re.MULTILINE))
    files = sorted((ROOT / "compose").glob("*.yaml"))
    read = {name for file in files for name in re.findall(r"\$\{([A-Z][A-Z0-9_]*)", file.read_text(encoding="utf-8"))}
    assert "PUBLISH_PORT" in read
    assert read - offered == set()


def test_a_copy_of_the_example_environment_is_accepted_by_every_service() -> None:
    """With every line made one's own: no variable in it may be unknown to whoever reads it."""
    example = (ROOT / "compose" / ".env.example").read_text(encoding="utf-8")
    environ = dict(re.findall(r"^#([A-Z][A-Z0-9_]*)=(.*)$", example, re.MULTILINE))
    assert IngressConfig.load({**environ, "ISTHMUS_INGRESS_MODEL": "/model"}).id == "ingress"
    assert PlannerConfig.load(environ) == PlannerConfig()
    assert WorkerConfig.load({**environ, "ISTHMUS_WORKER_ID": "w"}).id == "w"
    relay = {"NODE_ID": "n", "SOCKET": "/run/relay.sock", "SECRET": "0123456789abcdef"}
    assert RelayConfig.load({**environ, **{f"ISTHMUS_RELAY_{k}": v for k, v in relay.items()}}).node_id == "n"


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from references(child)


def test_every_reference_of_the_asyncapi_document_resolves() -> None:
    document = yaml.safe_load((ROOT / "schemas" / "asyncapi.yaml").read_text())
    found = list(references(document))
    assert found
    for reference in found:
        if reference.startswith("./"):
            schema = json.loads((ROOT / "schemas" / reference).read_text())
            assert schema["$id"] == reference.removeprefix("./")
            continue
        node = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def test_every_message_travels_on_some_subject() -> None:
    travelling = {message for c in CHANNELS for message in (c.message, c.reply) if message is not None}
    assert travelling == set(all_messages().values())


def test_every_variable_token_of_a_subject_is_described() -> None:
    for channel in CHANNELS:
        assert set(re.findall(r"{(\w+)}", channel.address)) == set(channel.parameters), channel.name


def test_the_tree_is_tidy() -> None:
    done = run("check_tidy.py")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "text", "finding"),
    [
        ("shared/long.py", "x = 1\n" * 401, "401 lines"),
        ("services/f.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
        ("kvrelay/utils.py", "", "a name that says nothing"),
        ("tests/test_x.py", "import asyncio\nasyncio.sleep(0.1)\n", "test_x.py:2: a test that sleeps"),
        ("tests/test_x.py", "import time\ntime.sleep(DELAY)\n", "test_x.py:2: a test that sleeps"),
        ("tests/support/fake.py", "import asyncio\nasyncio.sleep(1)\n", "fake.py:2: a test that sleeps"),
        ("docs/a.md", "see /wo" + "rk/x\n", "a path of one machine"),
        ("shared/a.py", "P = '/tm" + "p/x'\n", "a fixed temporary path"),
    ],
)
def test_what_is_untidy_is_found(tmp_path: Path, name: str, text: str, finding: str) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    done = run("check_tidy.py", "--root", str(tmp_path))
    assert done.returncode == 1
    assert finding in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_what_is_tidy_passes(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text("import asyncio\nasyncio.sleep(0)\nself.sleep(3)\n")
    for folder in ("sim", "support"):
        (tmp_path / "tests" / folder).mkdir()
    (tmp_path / "tests" / "sim" / "test_y.py").write_text("import asyncio\nasyncio.sleep(3600)\n")
    (tmp_path / "tests" / "support" / "fake.py").write_text("import asyncio\nasyncio.sleep(step_s)\n")
    (tmp_path / "docs.md").write_text("https://example.org/work/x and ./work/x\n")
    assert run("check_tidy.py", "--root", str(tmp_path)).returncode == 0
