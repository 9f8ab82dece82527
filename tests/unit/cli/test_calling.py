from __future__ import annotations

from pathlib import Path

from isthmus_cli.calling import own_command


def test_the_command_is_told_as_this_shell_can_call_it(tmp_path: Path) -> None:
    here, other = str(tmp_path / "isthmus"), str(tmp_path / "other" / "isthmus")
    assert own_command(here, lambda name: here if name == "isthmus" else None) == "isthmus"
    assert own_command(here, lambda _: other) == here, "the name alone would start another one"
    assert own_command(".venv/bin/isthmus", lambda _: None) == ".venv/bin/isthmus"
    assert own_command("cli/isthmus_cli/__main__.py", lambda _: None) == "python -m isthmus_cli"
