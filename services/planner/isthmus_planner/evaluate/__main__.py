"""`python -m isthmus_planner.evaluate`: the comparison, to standard output or into a page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from isthmus_planner.evaluate.calibration import learn_all
from isthmus_planner.evaluate.page import page
from isthmus_planner.evaluate.runs import LOAD, PLANNER, SEED, compare
from isthmus_planner.sim.hardware import ScenarioError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="isthmus_planner.evaluate", description=__doc__)
    parser.add_argument("--traces", type=Path, default=Path("data/traces"), help="folder of the traces")
    parser.add_argument("--report", type=Path, help="write the page there")
    parser.add_argument("--load", type=float, default=LOAD, help="rate, of the mix's upper bound")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args(arguments)
    if not 0 < options.load <= 10:
        parser.error(f"--load is {options.load:g}; give a number above 0 and at most 10")
    cells = []
    try:
        for cell in compare(options.traces, load=options.load, seed=options.seed):
            cells.append(cell)
            share = 100 * cell.scores[PLANNER].share
            sys.stderr.write(f"{cell.trace} {cell.timing.value} {cell.mix}: planner {share:.1f} %\n")
        text = page(cells, learn_all(options.traces, options.seed), "make goodput")
        if options.report is None:
            sys.stdout.write(text)
        else:
            options.report.write_text(text, encoding="utf-8")
    except (ScenarioError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
