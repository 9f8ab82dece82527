"""Roles under a load that turns and one that oscillates, on the real services in virtual time (docs/roles.md).

python bench/roles.py [--scale N] [--out FOLDER] [--only turning|oscillating]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from isthmus_sim.turning import Scenario, Second, Told, turn

BIN_S = 20.0
TURNING = Scenario()
OSCILLATING = replace(TURNING, before_s=0.0, after_s=240.0, period_s=40.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=1, help="lengths divided, costs multiplied by it (faster)")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of bench-roles.json and bench-roles.svg")
    parser.add_argument("--only", choices=("turning", "oscillating"))
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.only != "oscillating":
        runs = {name: _run(name, replace(TURNING, balance=on, scale=options.scale)) for name, on in _SIDES.items()}
        print(_table(runs))
        options.out.mkdir(parents=True, exist_ok=True)
        _plot(runs, options.out / "bench-roles.svg")
        found |= {name: _facts(told) for name, told in runs.items()}
    if options.only != "turning":
        told = _run("oscillating", replace(OSCILLATING, scale=options.scale))
        print(
            f"oscillating every {OSCILLATING.period_s:g} s for {OSCILLATING.lasts_s:g} s: {told.changes or 'no change'}"
        )
        found["oscillating"] = _facts(told)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "bench-roles.json").write_text(json.dumps(found, indent=1) + "\n")


_SIDES = {"assigned": True, "fixed": False}


def _run(name: str, scenario: Scenario) -> Told:
    began_s = time.process_time()

    def told_of(second: Second) -> None:
        if second.at_s % 20 < 1:
            print(f"{name} {second.at_s:5.0f} s  {second.prefill}:{second.decode}", flush=True)

    told = turn(scenario, told_of)
    if told.problems:
        raise SystemExit("\n".join(told.problems))
    print(f"{name}: {len(told.outcomes)} requests, {len(told.unfinished)} dropped, ", end="")
    print(f"{time.process_time() - began_s:.0f} CPU seconds", flush=True)
    return told


def _facts(told: Told) -> dict[str, Any]:
    return {
        "scenario": asdict(told.scenario),
        "requests": len(told.outcomes),
        "dropped": len(told.unfinished),
        "changes": [list(change) for change in told.changes],
        "split": [[round(second.at_s), second.prefill, second.decode] for second in told.seconds],
        "good": [[start, *told.good(start, start + BIN_S)] for start in _bins(told)],
    }


def _bins(told: Told) -> list[float]:
    return [BIN_S * number for number in range(int(told.scenario.lasts_s / BIN_S))]


def _table(runs: dict[str, Told]) -> str:
    """By the time of arrival: the split, and how many requests met both targets."""
    lines = ["", "| arrived, s | asked | " + " | ".join(f"{n}: split | met both" for n in runs) + " |"]
    lines.append("| --- " * (2 + 2 * len(runs)) + "|")
    first = next(iter(runs.values()))
    for start in _bins(first):
        cells = []
        for told in runs.values():
            split = next(s for s in reversed(told.seconds) if s.at_s <= start + BIN_S)
            good, all_ = told.good(start, start + BIN_S)
            cells.append(f"{split.prefill}:{split.decode} | {good / max(1, all_):.0%}")
        asked = first.good(start, start + BIN_S)[1]
        lines.append(f"| {start:.0f}-{start + BIN_S:.0f} | {asked} | " + " | ".join(cells) + " |")
    for name, told in runs.items():
        lines.append(f"{name}: {len(told.unfinished)} of {len(told.outcomes)} streams dropped; changes {told.changes}")
    return "\n".join([*lines, ""])


def _plot(runs: dict[str, Told], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 5))
    for name, told in runs.items():
        lasts_s = told.scenario.lasts_s
        seconds = [second for second in told.seconds if second.at_s <= lasts_s]
        above.step([s.at_s for s in seconds], [s.prefill for s in seconds], where="post", label=f"{name}: prefill")
        middles = [start + BIN_S / 2 for start in _bins(told)]
        shares = [good / max(1, all_) for good, all_ in (told.good(b, b + BIN_S) for b in _bins(told))]
        below.plot(middles, shares, marker="o", label=name)
    turned_s = next(iter(runs.values())).scenario.before_s
    for axes in (above, below):
        axes.axvline(turned_s, color="grey", linestyle=":")
        axes.legend()
    above.set_ylabel("workers that prefill, of 8")
    above.set_title("8K/1K turns into 1K/8K at the dotted line")
    below.set_ylabel("share that met both targets")
    below.set_xlabel("arrived at, s of virtual time")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    print(f"plot: {path}")


if __name__ == "__main__":
    main()
