"""The model of a local cluster: the user's, or the one that comes with the package."""

from __future__ import annotations

from pathlib import Path

from isthmus_shared import demo_model
from isthmus_shared.errors import ConfigInvalid


def chosen_model(path: Path | None) -> Path:
    """The folder to serve. Raises `ConfigInvalid` when the user's is none."""
    if path is None:
        return demo_model.FOLDER
    if not (path / "config.json").is_file():
        raise ConfigInvalid(
            f"{path} is not a model folder",
            why="it has no config.json",
            todo="give a Hugging Face folder, or leave `model.path` out for the demo's",
            param="model.path",
        )
    return path.absolute()
