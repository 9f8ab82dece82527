from __future__ import annotations

from pathlib import Path

import pytest

from isthmus_shared.engines.reference.checkpoint import ensure_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small seeded checkpoint, made once for all clusters and for the engine they are compared with."""
    return ensure_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One whole cluster at a time: with `-n 2`, all of them go to the same worker, and the other runs the rest."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.xdist_group("clusters"))
