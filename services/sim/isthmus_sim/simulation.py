"""One seed, one run: load, faults, healing, and what broke a rule."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from isthmus_shared.simloop import NothingLeftToDo, run_simulated
from isthmus_sim.cluster import Cluster
from isthmus_sim.faults import Planned, inflict, plan
from isthmus_sim.load import Outcome, answers_of_one_engine, draw, verdict
from isthmus_sim.trace import Trace

LOAD_S, FAULTS_S = 1.5, 2.5
SETTLE_S = 2.0
"""After the last fault has healed, until new requests must succeed: a few heartbeats."""


@dataclass(frozen=True)
class Result:
    seed: int
    problems: list[str]
    trace: list[str]
    outcomes: list[Outcome]
    faults: list[Planned]

    @property
    def report(self) -> str:
        return "\n".join([f"seed {self.seed}:", *self.problems, "", f"replay: make sim ARGS='--seed {self.seed}'"])


def simulate(
    seed: int, *, faults: list[Planned] | None = None, requests: int | None = None, unseen: bool = False
) -> Result:
    """Runs that seed in virtual time. `faults` and `requests` (how many) in place of what the seed says; `unseen`: no
    client may notice that anything failed."""
    trace = Trace()
    rng = random.Random(f"{seed}:plan")
    planned = plan(rng, over_s=FAULTS_S)
    count = rng.randint(10, 40)
    planned = planned if faults is None else faults
    problems: list[str] = []
    outcomes: list[Outcome] = []
    with _logging_to(trace), ThreadPoolExecutor(1) as executor:
        try:
            run_simulated(_run(seed, trace, executor, rng, planned, requests or count, unseen, problems, outcomes))
        except (AssertionError, NothingLeftToDo, ExceptionGroup) as error:
            problems.append("".join(traceback.format_exception(error)))
    return Result(seed, problems, trace.lines(), outcomes, planned)


async def _run(
    seed: int,
    trace: Trace,
    executor: ThreadPoolExecutor,
    rng: random.Random,
    planned: list[Planned],
    count: int,
    unseen: bool,
    problems: list[str],
    outcomes: list[Outcome],
) -> None:
    asks = draw(rng, count + 4, over_s=LOAD_S)
    late, asks = [ask for ask in asks if ask.sampling.seed >= count], [a for a in asks if a.sampling.seed < count]
    wanted = await answers_of_one_engine([*asks, *late])
    cluster = Cluster(seed, trace, executor)
    cluster.world.problems = problems
    cluster.outcomes = outcomes
    await cluster.start()
    async with asyncio.TaskGroup() as going:
        for each in planned:
            going.create_task(inflict(cluster, each))
        for ask in asks:
            going.create_task(cluster.ask(ask))
    await cluster.check_nothing_is_left()
    problems += [
        text for o in outcomes if (text := verdict(o, wanted[o.ask.name], faults=bool(planned) and not unseen))
    ]
    trace.note("simulation", "asks anew")
    await asyncio.sleep(SETTLE_S)
    outcomes.clear()
    async with asyncio.TaskGroup() as going:
        for ask in late:
            going.create_task(cluster.ask(ask))
    problems += [f"after all: {text}" for o in outcomes if (text := verdict(o, wanted[o.ask.name], faults=False))]
    await cluster.check_nothing_is_left()
    await cluster.stop()


@contextmanager
def _logging_to(trace: Trace) -> Iterator[None]:
    """The services' log becomes part of the trace."""
    before = structlog.get_config()
    structlog.configure(processors=[trace], cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)
