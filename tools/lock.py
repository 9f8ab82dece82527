"""Writes requirements/<image>.txt: every package of an image, or of a developer's machine, with its files' hashes.

python tools/lock.py             what pyproject.toml asks for, keeping the versions that the files have
python tools/lock.py --check     exit 1 if the files do not fit pyproject.toml
python tools/lock.py --upgrade   the latest versions instead

Needs uv (`make lock` installs it) and a package index. Install with `pip install --require-hashes -r requirements/…`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
LOCKS: dict[str, tuple[str, ...]] = {
    "planner": ("planner", "tracing"),
    "ingress": ("ingress", "tracing"),
    "kvrelay": ("relay",),
    "kvrelay-rdma": ("rdma",),
    "worker": ("relay", "torch", "tracing"),
    "local": ("local",),
    "dev": ("dev",),
}
"""File → extras of pyproject.toml. The first five are the images of compose/Dockerfile."""
PYTHON = "3.11"
"""The oldest that is served; markers in the files say what is for newer ones only."""


def compiled(target: Path, extras: Sequence[str], *, upgrade: bool) -> None:
    """Raises `CalledProcessError`; uv has said why on stderr."""
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-header"]
    command += ["--python-version", PYTHON, "--output-file", str(target)]
    command += [f"--extra={extra}" for extra in extras] + ["--upgrade"] * upgrade + ["pyproject.toml"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file does not fit")
    parser.add_argument("--upgrade", action="store_true", help="take the latest versions")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    stale = []
    with tempfile.TemporaryDirectory() as folder:
        for name, extras in LOCKS.items():
            kept, made = FOLDER / f"{name}.txt", Path(folder) / f"{name}.txt"
            if kept.exists():
                shutil.copy(kept, made)
            compiled(made, extras, upgrade=options.upgrade)
            if not kept.exists() or kept.read_text() != made.read_text():
                stale.append(name)
                if not options.check:
                    shutil.copy(made, kept)
    if options.check and stale:
        print("does not fit pyproject.toml; run `make lock` and commit:", *stale, sep="\n  ")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
