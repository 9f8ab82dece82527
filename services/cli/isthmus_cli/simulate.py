"""`isthmus sim`: the services in virtual time under seeded faults. What runs is `isthmus_sim`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus_cli.exits import EPILOG, Exit
from isthmus_cli.failing import fail
from isthmus_shared.errors import ConfigInvalid

if TYPE_CHECKING:
    from isthmus_sim.plan import Plan

MAX_FILE_BYTES = 4 * 1024 * 1024
"""A schedule has a few kilobytes."""


def add_to(app: typer.Typer) -> None:
    app.command(name="sim", epilog=EPILOG)(simulate)


def simulate(
    seed: Annotated[int | None, typer.Option(help="Run that seed alone, and show its trace.", min=0)] = None,
    schedule: Annotated[Path | None, typer.Option(help="Run the schedule in that file, and show its trace.")] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds to run when none is named.", min=1)] = 100,
    first: Annotated[int, typer.Option(help="The first of them.", min=0)] = 0,
    jobs: Annotated[int, typer.Option(help="Processes; 0: as many as there are cores, two at most.", min=0)] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="With --seed or --schedule: no trace.")] = False,
    shrink: Annotated[bool, typer.Option(help="Make what fails small.")] = True,
) -> None:
    """Run ingress, planners, workers and relays in virtual time, with faults drawn from a seed.

    Afterwards every request must have ended once, with the right tokens or a typed error, and nothing may be left held.
    What fails is told with its smallest schedule; a seed gives the same run wherever it is run.
    """
    try:
        from isthmus_sim import plan
        from isthmus_sim import seeds as running
    except ImportError as error:
        todo = "install it with: pip install 'isthmus[local]'"
        fail(ConfigInvalid(f"`isthmus sim` needs {error.name}", todo=todo), Exit.INVALID)
    try:
        one = _read(schedule) if schedule is not None else None if seed is None else plan.draw_plan(seed)
    except ConfigInvalid as error:
        fail(error, Exit.INVALID)
    if one is not None:
        raise typer.Exit(Exit.OK if _run_one(one, trace=not quiet, shrink=shrink) else Exit.FAILED)
    summary = running.run_seeds(first, seeds, jobs=jobs or running.default_jobs(), say=_say)
    for failure in summary.failures[: running.MAX_SHOWN if shrink else 0]:
        running.explain(failure, _say)
    _say(summary.text)
    raise typer.Exit(Exit.FAILED if summary.failures else Exit.OK)


def _run_one(plan: Plan, *, trace: bool, shrink: bool) -> bool:
    from isthmus_sim import seeds as running
    from isthmus_sim.simulation import run

    result = run(plan)
    for line in plan.text():
        _say(line)
    for line in result.trace.lines() if trace else ():
        _say(line)
    if not result.problems:
        _say(f"seed {plan.seed}: nothing is wrong after {result.world_s:.1f} s of virtual time")
        return True
    if shrink:
        running.explain_plan(plan, result.problems, _say)
    else:
        for problem in result.problems:
            _say(problem)
    return False


def _read(path: Path) -> Plan:
    from isthmus_sim.plan import Plan

    todo = "give a file that `isthmus sim` has printed"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigInvalid(f"{path} has more than {MAX_FILE_BYTES} bytes", todo=todo)
        return Plan.from_json(json.loads(path.read_text()))
    except OSError as error:
        raise ConfigInvalid(f"cannot read {path}", why=str(error), todo=todo) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigInvalid(f"{path} holds no schedule", why=why, todo=todo) from error


def _say(text: str) -> None:
    print(text, flush=True)
