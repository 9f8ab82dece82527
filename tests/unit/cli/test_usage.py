"""How the command meets a slip of the pen, a shell that completes, and a program that reads its JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus_cli.exits import EPILOG, Exit
from isthmus_cli.main import main
from isthmus_cli.shapes import SHAPES
from isthmus_testing.local_cluster import environment

ROOT = Path(__file__).parents[3]
WAIT_S = 100


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def isthmus(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command as its entry point runs it: exit code, stdout, stderr."""

    def run(*arguments: str, **env: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["isthmus", *arguments])
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main()
        return (int(ended.value.code or 0), *capfd.readouterr())

    return run


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
def test_wrong_usage_is_one_line_that_names_what_was_meant(
    isthmus: Run, arguments: list[str], names: str, see: str
) -> None:
    code, shown, said = isthmus(*arguments)
    assert (code, shown) == (2, "")
    (line,) = said.splitlines()
    assert line.startswith("isthmus: ")
    assert names in line
    assert line.endswith(f"; see `{see}`")
    assert "Value error" not in line


def test_a_command_that_only_has_others_shows_them(isthmus: Run) -> None:
    for arguments, shown in ((), "calibrate"), (("bench",), "relay"):
        code, text, _ = isthmus(*arguments)
        assert code == 2
        assert shown in text


def test_a_shell_completes_commands_options_and_values(isthmus: Run) -> None:
    def completed(*words: str) -> set[str]:
        count = str(len(words) - 1)
        _, found, said = isthmus(_ISTHMUS_COMPLETE="complete_bash", COMP_WORDS=" ".join(words), COMP_CWORD=count)
        assert said == ""
        return set(found.split())

    assert completed("isthmus", "sta") == {"status"}
    assert {"--watch", "--json"} <= completed("isthmus", "status", "--")
    assert completed("isthmus", "up", "--engine", "re") == {"reference"}


def test_completion_is_installed_into_ones_own_home(tmp_path: Path) -> None:
    typed = f"{sys.executable} -m isthmus_cli --install-completion; true"  # bash stays, to be found as the shell
    env = {**environment(), "HOME": str(tmp_path)}
    found = subprocess.run(["bash", "-c", typed], env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("_ISTHMUS_COMPLETE=complete_bash" in path.read_text() for path in files), found.stdout + found.stderr


def test_every_exit_code_is_in_the_help_and_on_the_page() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for code in Exit:
        assert f"{code.value} {code.meaning.replace('`', '')}" in EPILOG
        assert f"| {code.value} | {code.meaning} |" in page


def test_a_page_that_differs_from_the_command_is_found(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for text, code in ((page, 0), (page.replace("--watch", "--look"), 1)):
        (tmp_path / "cli.md").write_text(text)
        tool = [sys.executable, str(ROOT / "tools" / "gen_cli_docs.py"), "--check", "--file", str(tmp_path / "cli.md")]
        assert (
            subprocess.run(tool, check=False, env=environment(), timeout=WAIT_S, capture_output=True).returncode == code
        )


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("plan", ["plan", "examples/plan/one-of-each.yaml", "examples/plan/long-answers.yaml"]),
        ("reproduce", ["reproduce"]),
        ("calibrate", ["calibrate", "data/inferencemax.csv", "--fit", "none"]),
    ],
)
def test_json_of_what_is_computed_is_as_documented(isthmus: Run, name: str, arguments: list[str]) -> None:
    code, text, said = isthmus(*(str(ROOT / each) if "/" in each else each for each in arguments), "--json")
    assert (code, said) == (0, ""), "and no progress into a pipe"
    assert SHAPES[name].problems(json.loads(text)) == []
