from __future__ import annotations

from pathlib import Path

import pytest

from isthmus_testing.ingress import write_text_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's text: byte-level tokenizer and chat template."""
    return write_text_folder(tmp_path / "model")
