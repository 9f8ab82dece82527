"""How the command meets a slip of the pen, a shell that completes, and a program that reads its JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus_cli.exits import EPILOG, Exit
from isthmus_cli.shapes import SHAPES
from isthmus_testing.local_cluster import environment

ROOT = Path(__file__).parents[3]
WAIT_S = 100


def isthmus(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "isthmus_cli", *arguments],
        env={**environment(), **env},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "names", "see"),
    [
        (["staus"], "'status'", "isthmus --help"),
        (["bench", "rely"], "'relay'", "isthmus bench --help"),
        (["status", "--jsn"], "--json", "isthmus status --help"),
        (["up", "--engine", "vlm"], "'vllm'", "isthmus up --help"),
        (["plan"], "'cluster'", "isthmus plan --help"),
    ],
)
def test_wrong_usage_is_one_line_that_names_what_was_meant(arguments: list[str], names: str, see: str) -> None:
    found = isthmus(*arguments)
    assert found.returncode == 2
    assert found.stdout == ""
    (line,) = found.stderr.splitlines()
    assert line.startswith("isthmus: ")
    assert names in line
    assert line.endswith(f"; see `{see}`")
    assert "Value error" not in line


def test_a_command_that_only_has_others_shows_them() -> None:
    for arguments, shown in ((), "calibrate"), (("bench",), "relay"):
        found = isthmus(*arguments)
        assert found.returncode == 2
        assert shown in found.stdout


def test_a_shell_completes_commands_options_and_values() -> None:
    def completed(*words: str) -> set[str]:
        count = str(len(words) - 1)
        found = isthmus(_ISTHMUS_COMPLETE="complete_bash", COMP_WORDS=" ".join(words), COMP_CWORD=count)
        assert found.returncode == 0, found.stderr
        return set(found.stdout.split())

    assert completed("isthmus", "sta") == {"status"}
    assert {"--watch", "--json"} <= completed("isthmus", "status", "--")
    assert completed("isthmus", "up", "--engine", "re") == {"reference"}


def test_completion_is_installed_into_ones_own_home(tmp_path: Path) -> None:
    found = isthmus("--install-completion", HOME=str(tmp_path), SHELL="/bin/bash", _TYPER_COMPLETE_TEST="1")
    if found.returncode != 0:  # started by no shell that it knows: then it must be told
        found = isthmus("--show-completion", "bash", HOME=str(tmp_path))
        assert "_ISTHMUS_COMPLETE" in found.stdout
        return
    assert any("_ISTHMUS_COMPLETE" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def test_every_exit_code_is_in_the_help_and_on_the_page() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for code in Exit:
        assert f"{code.value} {code.meaning.replace('`', '')}" in EPILOG
        assert f"| {code.value} | {code.meaning} |" in page


def test_the_page_is_what_the_command_is(tmp_path: Path) -> None:
    tool = [sys.executable, str(ROOT / "tools" / "gen_cli_docs.py"), "--check"]
    assert subprocess.run(tool, check=False, env=environment(), timeout=WAIT_S).returncode == 0
    changed = tmp_path / "cli.md"
    changed.write_text((ROOT / "docs" / "cli.md").read_text().replace("--watch", "--look"))
    assert (
        subprocess.run([*tool, "--file", str(changed)], check=False, env=environment(), timeout=WAIT_S).returncode == 1
    )


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("plan", ["plan", "examples/plan/one-of-each.yaml", "examples/plan/long-answers.yaml"]),
        ("reproduce", ["reproduce"]),
        ("calibrate", ["calibrate", "data/inferencemax.csv", "--fit", "none"]),
    ],
)
def test_json_of_what_is_computed_is_as_documented(name: str, arguments: list[str]) -> None:
    found = isthmus(*(str(ROOT / each) if "/" in each else each for each in arguments), "--json")
    assert found.returncode == 0, found.stderr
    assert found.stderr == "", "no progress into a pipe"
    assert SHAPES[name].problems(json.loads(found.stdout)) == []
