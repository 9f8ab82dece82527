"""The model of a local cluster: the user's, or a small seeded one made on first use."""

from __future__ import annotations

import asyncio
from pathlib import Path

from isthmus_cli.reporter import Reporter
from isthmus_cli.state import StateDir
from isthmus_shared.errors import ConfigInvalid


async def ensure_model(path: Path | None, state_dir: StateDir, reporter: Reporter) -> Path:
    """The folder to serve. Raises `ConfigInvalid` when the user's is none."""
    if path is not None:
        return _checked(path)
    made = state_dir.path / "models" / "tiny"
    if not made.exists():
        reporter.say("model.making", f"making a small seeded model in {made}")
    return await asyncio.to_thread(_make, made)


def _checked(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ConfigInvalid(
            f"{path} is not a model folder",
            why="it has no config.json",
            todo="give a Hugging Face folder, or leave `model.path` out for a small seeded one",
            param="model.path",
        )
    return path.absolute()


def _make(path: Path) -> Path:
    from isthmus_shared.engines.reference.checkpoint import ensure_tiny_checkpoint  # numpy: only when it is needed

    return ensure_tiny_checkpoint(path)
