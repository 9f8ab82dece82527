"""Which model a folder holds. Torch-free."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from isthmus_shared.errors import ConfigInvalid

_READ_BYTES = 1 << 20


def model_fingerprint(folder: Path) -> str:
    """sha256 over config.json and every *.safetensors file, by name. Raises `ConfigInvalid` if they are missing."""
    files = [folder / "config.json", *weight_files(folder)]
    digest = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as file:
                digest.update(f"{path.name}:{path.stat().st_size}\n".encode())
                while piece := file.read(_READ_BYTES):
                    digest.update(piece)
        except OSError as error:
            raise ConfigInvalid(f"model file {path} cannot be read", why=str(error), param="model_path") from error
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those that model.safetensors.index.json names, or every *.safetensors."""
    index = folder / "model.safetensors.index.json"
    found = _indexed(folder, index) if index.exists() else sorted(folder.glob("*.safetensors"))
    if not found:
        raise ConfigInvalid(
            f"no *.safetensors in {folder}", todo="name a folder in Hugging Face form", param="model_path"
        )
    return found


def _indexed(folder: Path, index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigInvalid(f"index {index} cannot be read", why=str(error), param="model_path") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigInvalid(f"index {index} names {name!r}", why="not a file of its folder", param="model_path")
    return sorted(folder / name for name in names)
