"""Both answers to one scenario: the planner's simulator's, and that of the real services in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import statistics
from dataclasses import dataclass, field

import structlog

from isthmus_planner.sim.arrivals import GAP
from isthmus_planner.sim.exact import ln, uniform
from isthmus_planner.sim.hardware import Node, Relay
from isthmus_planner.sim.scenario import Scenario
from isthmus_planner.sim.simulate import simulate
from isthmus_planner.sim.workload import ClosedLoop, Lengths, Stream
from isthmus_sim.agreement.cluster import PacedCluster
from isthmus_sim.loop import run_world, world_loop
from isthmus_sim.services import MODEL


@dataclass(frozen=True, slots=True)
class Case:
    """A closed loop of `clients` over one pair of nodes; requests come into being at `rate_per_s`."""

    name: str
    prefill: Node
    decode: Node
    lane: Relay
    isl_tokens: int
    osl_tokens: int
    clients: int
    requests: int
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    e2el_p50_s: float
    itl_mean_s: float
    """Of all gaps between an answer's tokens; its first holds its transfer."""
    itl_p99_s: float
    """The services': without each answer's first."""
    ttft_p50_s: float
    tokens_per_s: float
    """Input and output, from the first request to the last end."""


@dataclass(frozen=True, slots=True)
class Compared:
    case: Case
    simulator: Figures
    services: Figures

    def off(self, name: str) -> float:
        """How far the services are from the simulator, relative."""
        return float(getattr(self.services, name) / getattr(self.simulator, name) - 1.0)


def by_simulator(case: Case, seed: int) -> Figures:
    stream = Stream(
        ClosedLoop(case.clients, case.rate_per_s),
        case.requests,
        Lengths.constant(case.isl_tokens),
        Lengths.constant(case.osl_tokens),
    )
    result = simulate(Scenario((case.prefill, case.decode), (stream,), relay=case.lane, seed=seed)).stream
    return Figures(
        result.e2el_s.p50, result.tpot_s.mean, result.itl_s.p99, result.ttft_s.p50, result.total_tokens_per_s
    )


def by_services(case: Case, seed: int) -> Figures:
    """Raises `AssertionError` when a request did not get its whole answer."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        answers, took_s = run_world(_run(case, seed))
    finally:
        structlog.configure(**before)
    spans_s = [(answer.at_s[-1] - answer.at_s[0]) / (case.osl_tokens - 1) for answer in answers]
    gaps = sorted(later - earlier for answer in answers for earlier, later in itertools.pairwise(answer.at_s[1:]))
    return Figures(
        e2el_p50_s=statistics.median(answer.at_s[-1] - answer.sent_s for answer in answers),
        itl_mean_s=statistics.fmean(spans_s),
        itl_p99_s=gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))],
        ttft_p50_s=statistics.median(answer.at_s[0] - answer.sent_s for answer in answers),
        tokens_per_s=len(answers) * (case.isl_tokens + case.osl_tokens) / took_s,
    )


@dataclass
class _Answer:
    sent_s: float
    at_s: list[float] = field(default_factory=list)
    """When each of its tokens came."""


async def _run(case: Case, seed: int) -> tuple[list[_Answer], float]:
    """The answers, and how long all took from the start of the first request's coming."""
    cluster = PacedCluster(
        case.prefill,
        case.decode,
        case.lane,
        isl_tokens=case.isl_tokens,
        osl_tokens=case.osl_tokens,
        in_flight=case.clients,
    )
    await cluster.start()
    world, began_s = world_loop(), world_loop().world_s
    free = asyncio.Semaphore(case.clients)
    answers: list[_Answer] = []
    comes_s = began_s
    async with asyncio.TaskGroup() as clients:
        for number in range(case.requests):
            comes_s += _gap_s(seed, number, case.rate_per_s)
            if comes_s > world.world_s:
                await asyncio.sleep(comes_s - world.world_s)
            await free.acquire()
            answers.append(_Answer(world.world_s))
            process = cluster.ingress.process
            assert process is not None
            asked = process.life.start(_ask(cluster, case, number, answers[-1]), name=f"client-{number}")
            clients.create_task(_until(asked, free))
    took_s = world.world_s - began_s
    assert not cluster.world.problems, cluster.world.problems
    await cluster.stop()
    return answers, took_s


def _gap_s(seed: int, number: int, rate_per_s: float) -> float:
    """The very gap before that request which the simulator draws."""
    return float(-ln(uniform(seed, 0, number, GAP)) / rate_per_s)


async def _until(asked: asyncio.Task[None], free: asyncio.Semaphore) -> None:
    try:
        await asked
    finally:
        free.release()


async def _ask(cluster: PacedCluster, case: Case, number: int, answer: _Answer) -> None:
    """One request, within the ingress' process."""
    world, frontend = world_loop(), cluster.ingress.frontend
    assert frontend is not None
    rng = random.Random(number)
    body = {
        "model": MODEL,
        "prompt": [rng.randrange(256) for _ in range(case.isl_tokens)],
        "max_tokens": case.osl_tokens,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }
    prepared = await frontend.prepare(body, chat=False, tenant=frontend.keyring.tenant_of(None))
    with frontend.exchange(prepared, f"request-{number}", received_s=world.time()) as exchange:
        while not exchange.finished:
            for _, update in await exchange.updates():
                if hasattr(update, "token_ids"):
                    answer.at_s += [world.world_s] * len(update.token_ids)
    assert len(answer.at_s) == case.osl_tokens, f"request {number}: {len(answer.at_s)} tokens"
