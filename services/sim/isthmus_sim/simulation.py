"""One plan, one run: load, faults, healing, and what broke a rule."""

from __future__ import annotations

import asyncio
import dataclasses
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from isthmus_shared.engines.sim import SimRunner
from isthmus_shared.simloop import NothingLeftToDo
from isthmus_sim.cluster import Cluster
from isthmus_sim.faults import Fault, Planned
from isthmus_sim.inflicting import inflict
from isthmus_sim.load import Ask, Outcome, answers_of_one_engine, verdict
from isthmus_sim.loop import run_world
from isthmus_sim.plan import Plan, draw_plan
from isthmus_sim.services import REQUEST_TIMEOUT_S, MakeRunner
from isthmus_sim.trace import Trace

SETTLE_S = 2.0
"""After the last fault has healed, until new requests must succeed: a few heartbeats."""


@dataclass(frozen=True)
class Result:
    plan: Plan
    problems: list[str]
    trace: Trace
    outcomes: list[Outcome]
    world_s: float
    """Virtual time that it took."""
    relay_events: int

    @property
    def report(self) -> str:
        seed = self.plan.seed
        return "\n".join([f"seed {seed}:", *self.problems, "", f"replay: isthmus sim --seed {seed}"])


def simulate(
    seed: int, *, faults: list[Planned] | None = None, requests: int | None = None, unseen: bool = False
) -> Result:
    """Runs that seed in virtual time. `faults` and `requests` (how many) in place of what the seed says; `unseen`: no
    client may notice that anything failed."""
    plan = draw_plan(seed)
    if faults is not None:
        plan = dataclasses.replace(plan, faults=tuple(faults))
    if requests is not None:
        plan = dataclasses.replace(plan, asks=plan.asks[:requests])
    return run(plan, unseen=unseen)


def run(plan: Plan, *, unseen: bool = False, make_runner: MakeRunner = SimRunner) -> Result:
    """That plan in virtual time, every engine with such a runner."""
    trace = Trace()
    problems: list[str] = []
    outcomes: list[Outcome] = []
    took: list[tuple[float, int]] = []
    with _logging_to(trace):
        try:
            run_world(_run(plan, trace, unseen, make_runner, problems, outcomes, took))
        except (AssertionError, NothingLeftToDo, ExceptionGroup) as error:
            problems.append("".join(traceback.format_exception(error)))
    world_s, events = took[0] if took else (0.0, 0)
    return Result(plan, problems, trace, outcomes, world_s, events)


async def _run(
    plan: Plan,
    trace: Trace,
    unseen: bool,
    make_runner: MakeRunner,
    problems: list[str],
    outcomes: list[Outcome],
    took: list[tuple[float, int]],
) -> None:
    loop = asyncio.get_running_loop()

    def broken(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        text = "".join(traceback.format_exception(error)) if error is not None else ""
        problems.append(f"{context['message']} {text}".rstrip())

    loop.set_exception_handler(broken)
    wanted = await answers_of_one_engine([*plan.asks, *plan.late], make_runner=make_runner)
    cluster = Cluster(plan.seed, trace, plan.size, make_runner=make_runner)
    cluster.world.problems = problems
    cluster.outcomes = outcomes
    watching = asyncio.create_task(cluster.watch_leaders())
    await cluster.start()
    async with asyncio.TaskGroup() as going:
        for each in plan.faults:
            going.create_task(inflict(cluster, each))
        for ask in plan.asks:
            going.create_task(cluster.ask(ask))
    await cluster.check_nothing_is_left()
    seen = bool(plan.faults) and not unseen
    slack_s = sum(each.lasts_s for each in plan.faults if each.fault is Fault.PAUSE)
    slack_s += plan.size.skew * REQUEST_TIMEOUT_S
    problems += _verdicts(outcomes, wanted, faults=seen, slack_s=slack_s)
    await _ask_anew(cluster, plan.late, wanted)
    watching.cancel()
    await cluster.stop()
    took.append((loop.time(), cluster.world.events))


async def _ask_anew(cluster: Cluster, late: tuple[Ask, ...], wanted: dict[str, tuple[list[int], str]]) -> None:
    cluster.world.trace.note("simulation", "asks anew")
    await asyncio.sleep(SETTLE_S)
    cluster.outcomes.clear()
    async with asyncio.TaskGroup() as going:
        for ask in late:
            going.create_task(cluster.ask(ask))
    found = _verdicts(cluster.outcomes, wanted, faults=False, slack_s=cluster.size.skew * REQUEST_TIMEOUT_S)
    cluster.world.problems += [f"after all: {text}" for text in found]
    await cluster.check_nothing_is_left()


def _verdicts(
    outcomes: list[Outcome], wanted: dict[str, tuple[list[int], str]], *, faults: bool, slack_s: float
) -> list[str]:
    each = (verdict(o, wanted[o.ask.name], faults=faults, slack_s=slack_s) for o in outcomes)
    return [text for text in each if text is not None]


@contextmanager
def _logging_to(trace: Trace) -> Iterator[None]:
    """The services' log becomes part of the trace."""
    before = structlog.get_config()
    structlog.configure(processors=[trace], cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)
