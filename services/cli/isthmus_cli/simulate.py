"""`isthmus sim`: the services in virtual time under seeded faults. What runs is `isthmus_sim`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus_cli.exits import EPILOG, Exit
from isthmus_cli.failing import fail
from isthmus_shared.errors import ConfigInvalid

if TYPE_CHECKING:
    from isthmus_sim.plan import Plan
    from isthmus_sim.seeds import Summary

Say = Callable[[str], None]

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
    whole: Annotated[bool, typer.Option("--whole", help="Do not look for the smallest schedule that fails.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="What came of it, as JSON, and nothing else.")] = False,
) -> None:
    """Run ingress, planners, workers and relays in virtual time, with faults drawn from a seed.

    Afterwards every request must have ended once, with the right tokens or a typed error, and nothing may be left held.
    What fails is told with its smallest schedule; a seed gives the same run wherever it is run.
    """
    try:
        from isthmus_sim.plan import draw_plan
        from isthmus_sim.seeds import default_jobs, run_seeds
    except ImportError as error:
        todo = "install it with: pip install 'isthmus[local]'"
        fail(ConfigInvalid(f"`isthmus sim` needs {error.name}", todo=todo), Exit.INVALID)
    if seed is not None and schedule is not None:
        fail(
            ConfigInvalid("what is to run?", why="--seed and --schedule are both given", todo="give one"), Exit.INVALID
        )
    say: Say = _nothing if as_json else _say
    try:
        one = _read(schedule) if schedule is not None else None if seed is None else draw_plan(seed)
    except ConfigInvalid as error:
        fail(error, Exit.INVALID)
    if one is not None:
        found = _one(one, say, trace=not quiet, shrink=not whole)
    else:
        found = _several(run_seeds(first, seeds, jobs=jobs or default_jobs(), say=say), say, shrink=not whole)
    if as_json:
        print(json.dumps(found, indent=1))
    raise typer.Exit(Exit.FAILED if found["failures"] else Exit.OK)


def _one(plan: Plan, say: Say, *, trace: bool, shrink: bool) -> dict[str, Any]:
    from isthmus_sim.seeds import explain
    from isthmus_sim.simulation import run

    result = run(plan)
    lines = result.trace.lines() if trace else []
    for line in (*plan.text(), *lines):
        say(line)
    found: dict[str, Any] = {"seeds": 1, "failures": [], "trace": lines}
    if result.problems:
        small = explain(plan, result.problems, say, shrinking=shrink)
        found["failures"] = [{"seed": plan.seed, "problems": result.problems, "schedule": small.as_json()}]
    else:
        say(f"seed {plan.seed}: nothing is wrong after {result.world_s:.1f} s of virtual time")
    return found


def _several(summary: Summary, say: Say, *, shrink: bool) -> dict[str, Any]:
    from isthmus_sim.plan import draw_plan
    from isthmus_sim.seeds import MAX_SHRUNK, explain

    failures = []
    for number, failure in enumerate(summary.failures):
        plan = draw_plan(failure.seed)
        small = explain(plan, failure.problems, say, shrinking=shrink and number < MAX_SHRUNK)
        failures.append({"seed": failure.seed, "problems": failure.problems, "schedule": small.as_json()})
    say(summary.text)
    return {"seeds": summary.seeds, "failures": failures}


def _read(path: Path) -> Plan:
    from isthmus_sim.plan import Plan

    todo = "give a file that `isthmus sim` has printed"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigInvalid(f"{path} has more than {MAX_FILE_BYTES} bytes", todo=todo)
        return Plan.from_json(json.loads(path.read_text()))
    except OSError as error:
        raise ConfigInvalid(f"cannot read {path}", why=error.strerror or str(error), todo=todo) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigInvalid(f"{path} holds no schedule", why=why, todo=todo) from error


def _say(text: str) -> None:
    print(text, flush=True)


def _nothing(_text: str) -> None:
    pass
