"""Writes tiny seeded checkpoints that vLLM, transformers and (Llama, Qwen3) the reference engine load.

python tools/make_tiny_checkpoints.py FOLDER [llama qwen3 gpt-oss deepseek-v3]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "shared"), str(ROOT / "tests" / "support")]

from isthmus_testing.tiny_checkpoints import Family, write_tiny_checkpoint  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="made if it is not there; each family becomes a folder in it")
    parser.add_argument("families", nargs="*", type=Family, metavar="FAMILY", help=f"of {', '.join(Family)}; all")
    parser.add_argument("--seed", type=int, default=20)
    arguments = parser.parse_args()
    for family in arguments.families or list(Family):
        print(write_tiny_checkpoint(arguments.folder / family.value, family, seed=arguments.seed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
