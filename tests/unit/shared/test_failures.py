"""docs/failures.md names tests that exist, and each row names at least two."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
ROWS = [
    line
    for line in (ROOT / "docs" / "failures.md").read_text().splitlines()
    if line.startswith("|") and not line.startswith(("| seen", "| ---"))
]


@cache
def defined_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_failure_is_there() -> None:
    assert len(ROWS) == 39


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:60])
def test_a_failure_seen_elsewhere_has_its_test_and_a_siblings(row: str) -> None:
    named = NAMED.findall(row)
    assert len(named) >= 2
    for file, test in named:
        assert test in defined_in(file), f"tests/{file} has no {test}"
