"""What STYLE.md asks for and neither ruff nor mypy checks. Exit 1 with one line per finding.

python tools/check_tidy.py [--root FOLDER]
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
SIZED_FOLDERS = ("shared/", "kvrelay/", "services/", "tools/")
FORBIDDEN_NAMES = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
VIRTUAL_TIME = ("tests/sim/",)
"""There a sleep takes no time."""
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".conf", ".cfg", ".sh", ""}
# A path that only one machine has; the first letter of each is in brackets so that this file passes its own check.
MACHINE_PATH = re.compile(r"(?<![\w.~$}/-])/([w]ork|[f]arm|[r]oot|[h]ome/[a-z]+|[U]sers/[a-z]+)/")
TEMP_PATH = re.compile(r"""["']/([t]mp)(/|["'])""")


def tracked(root: Path) -> list[str]:
    """What git tracks or would: new files count too, ignored ones do not."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True).stdout.decode().split("\0")
    return sorted(name for name in names if name and (root / name).is_file())


def findings(root: Path, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        path = root / name
        if path.name in FORBIDDEN_NAMES:
            yield f"{name}: a name that says nothing; name the file after what is in it"
        if path.suffix not in TEXT_SUFFIXES:
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        yield from _path_findings(name, text)
        if path.suffix == ".py":
            yield from _python_findings(name, text)


def _path_findings(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if MACHINE_PATH.search(line):
            yield f"{name}:{number}: a path of one machine"
        if TEMP_PATH.search(line) and not name.startswith("tests/"):
            yield f"{name}:{number}: a fixed temporary path; use tempfile"


def _python_findings(name: str, text: str) -> Iterator[str]:
    tree = ast.parse(text, name)
    if name.startswith(SIZED_FOLDERS):
        lines = text.count("\n")
        if lines > MAX_FILE_LINES:
            yield f"{name}: {lines} lines; at most {MAX_FILE_LINES}"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _function_findings(name, node)
    if name.startswith("tests/") and not name.startswith(VIRTUAL_TIME):
        fake = name.startswith("tests/support/")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _is_sleep(node, allow_variable=fake):
                yield f"{name}:{node.lineno}: a test that sleeps; wait for the event under asyncio.timeout"


def _function_findings(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines > MAX_FUNCTION_LINES:
        yield f"{name}:{node.lineno}: {node.name} has {lines} lines; at most {MAX_FUNCTION_LINES}"


def _is_sleep(node: ast.Call, *, allow_variable: bool) -> bool:
    """`sleep` of time, asyncio, anyio or by itself, with anything but a literal 0.

    With `allow_variable` only a literal is one: a fake worker may take as long for a step as its test told it.
    """
    match node.func:
        case ast.Attribute(value=ast.Name(id="time" | "asyncio" | "anyio"), attr="sleep") | ast.Name(id="sleep"):
            argument = node.args[0] if node.args else None
            if not isinstance(argument, ast.Constant):
                return not allow_variable
            return argument.value != 0
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root
    found = list(findings(root, tracked(root)))
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
