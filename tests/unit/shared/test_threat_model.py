"""What docs/threat-model.md says is shown by a test, is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
TABLE = re.compile(r"^\|.*\|$", re.MULTILINE)
PATH = re.compile(r"`((?:unit|integration|e2e|property|contract|sim|compose)/[\w/]*(?:\.py)?)`")
NAME = re.compile(r"`(test_\w+)`")


def test_every_test_that_the_threat_model_names_exists() -> None:
    text = (ROOT / "docs" / "threat-model.md").read_text()
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    paths, names = set(PATH.findall(text)), set(NAME.findall(text))
    assert len(paths) > 15
    assert len(names) > 10
    missing = [path for path in sorted(paths) if not (ROOT / "tests" / path).exists()]
    missing += [name for name in sorted(names) if f"def {name}(" not in sources and f"{name}.py" not in text]
    assert not missing


def test_every_threat_says_what_shows_that_it_is_met() -> None:
    rows = TABLE.findall((ROOT / "docs" / "threat-model.md").read_text())
    threats = [row.strip("|").split(" | ") for row in rows if row.count(" | ") == 2]
    unshown = [row[0].strip() for row in threats if row[2].strip() in ("", "–")]
    assert unshown == ["not knowing what is inside"]
