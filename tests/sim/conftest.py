"""``--seeds N``: how many seeds to run; ``--seed K``: only that one, and its trace in the report."""

from __future__ import annotations

import pytest

DEFAULT_SEEDS = 40


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption("--seeds", type=int, default=DEFAULT_SEEDS, help="how many seeds to simulate")
    group.addoption(
        "--seed", type=int, default=None, help="simulate that seed and show its trace (with -rP or on failure)"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "random_seed" not in metafunc.fixturenames:
        return
    config = metafunc.config
    one: int | None = config.getoption("seed", None)
    count: int = config.getoption("seeds", DEFAULT_SEEDS)
    metafunc.parametrize("random_seed", range(count) if one is None else [one])
