"""Several models in one setting: ``name=folder`` each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from isthmus_shared.errors import ConfigInvalid

MAX_NAME_CHARS = 200


def parse_model_folders(entries: Sequence[str]) -> dict[str, Path | None]:
    """Folder by name, in order; None where nothing follows the sign (an engine that needs no folder).

    Raises `ConfigInvalid` that names the entry.
    """
    found: dict[str, Path | None] = {}
    for entry in entries:
        name, sign, folder = (part.strip() for part in entry.partition("="))
        if not sign or not name:
            raise ConfigInvalid(f"{entry!r} names no model", todo="write it as name=folder")
        if len(name) > MAX_NAME_CHARS:
            raise ConfigInvalid(f"the model name {name[:32]!r}… is longer than {MAX_NAME_CHARS} characters")
        if name in found:
            raise ConfigInvalid(f"the model {name!r} is named twice", todo="give each model one folder")
        found[name] = Path(folder) if folder else None
    return found
