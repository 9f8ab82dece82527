from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from isthmus_testing.compose_cluster import ComposeCluster, compose_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[ComposeCluster]:
    """One for all tests here; each leaves it as it found it."""
    with compose_cluster(f"isthmus-test-{uuid.uuid4().hex[:8]}") as cluster:
        yield cluster
