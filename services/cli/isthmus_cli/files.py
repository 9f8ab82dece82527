"""Files that a command was asked to write."""

from __future__ import annotations

from pathlib import Path

from isthmus_shared.errors import ConfigInvalid


def write(path: Path, text: str) -> None:
    """Raises `ConfigInvalid` when the place cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigInvalid(f"{path} cannot be written", why=error.strerror or str(error)) from error
