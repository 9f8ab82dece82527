"""How the user called this command, to tell how it can be called again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def own_command(argv0: str, find: Callable[[str], str | None]) -> str:
    """`find`: where the shell would find a name. A virtual environment that is not active is not on its path."""
    path = Path(argv0)
    if path.name == "__main__.py":
        return "python -m isthmus_cli"
    found = find(path.name)
    return path.name if found is not None and Path(found).resolve() == path.resolve() else argv0
