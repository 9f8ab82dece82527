"""The demo's model, in this folder: a small byte-level transformer, made by tools/train_demo_model.py (README.md)."""

from __future__ import annotations

import shutil
from pathlib import Path

FOLDER = Path(__file__).parent
"""In Hugging Face form, beside this file."""
FILES = ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json")


def copy_to(folder: Path) -> None:
    """`config.json` last, and each file whole or not at all: with it there, all is."""
    for name in FILES:
        part = folder / f".{name}.part"
        shutil.copyfile(FOLDER / name, part)
        part.rename(folder / name)
