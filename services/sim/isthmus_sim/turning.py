"""A load that turns from long prompts to long answers, on the real services in virtual time.

Every worker can take either role. The same load runs twice, with roles that stay and with roles that the planner
assigns; both tell what became of every request and how the workers were divided, second by second.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

import structlog

from isthmus_shared.messages.health import ProcessState, Role
from isthmus_shared.messages.work import SamplingParams
from isthmus_sim.bucket import MemoryBucket, Stored
from isthmus_sim.load import Ask, Outcome, serve
from isthmus_sim.loop import run_world, world_loop
from isthmus_sim.process import Service, World
from isthmus_sim.relay import Relay
from isthmus_sim.services import Planner, SimIngress, Worker
from isthmus_sim.trace import Trace

Shape = tuple[int, int]
LONG_IN: Shape = (8192, 1024)
LONG_OUT: Shape = (1024, 8192)
TICK_S = 1.0
START_S = 4.0
"""Until everyone has heard everyone."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """`scale`: lengths are divided and every cost multiplied by it, so that shorter requests take as long."""

    prefill: int = 6
    decode: int = 2
    rate_per_s: float = 1.5
    before_s: float = 60.0
    after_s: float = 180.0
    period_s: float | None = None
    """Of a load that turns again and again; None: it turns once, after `before_s`."""
    scale: int = 1
    balance: bool = True
    ttft_target_s: float = 4.0
    itl_target_s: float = 0.02
    """Of a request, mean over its answer; multiplied by `scale`."""
    seed: int = 1

    def shape(self, at_s: float) -> Shape:
        turned = at_s >= self.before_s if self.period_s is None else at_s % self.period_s >= self.period_s / 2
        isl, osl = LONG_OUT if turned else LONG_IN
        return isl // self.scale, osl // self.scale

    @property
    def lasts_s(self) -> float:
        return self.before_s + self.after_s

    @property
    def costs(self) -> dict[str, float]:
        """Of a worker's steps: prompts cost five times what the sim engine's defaults say, so that both shapes of
        requests keep several workers of a small cluster busy."""
        plain = {
            "sim_prefill_base_s": 0.004,
            "sim_prefill_token_s": 200e-6,
            "sim_decode_base_s": 0.006,
            "sim_decode_sequence_s": 30e-6,
            "sim_decode_resident_token_s": 50e-9 * self.scale,
        }
        return {name: cost * self.scale for name, cost in plain.items()}


@dataclass(frozen=True, slots=True)
class Second:
    """The cluster at one moment."""

    at_s: float
    prefill: int
    decode: int
    prefilling: int
    """Sequences that wait for or are in prefill."""
    decoding: int


@dataclass(slots=True)
class Told:
    """What a run showed."""

    scenario: Scenario
    seconds: list[Second] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    changes: list[tuple[float, str, str]] = field(default_factory=list)
    """When, which worker, to which roles: as its heartbeat shows it."""
    problems: list[str] = field(default_factory=list)

    @property
    def unfinished(self) -> list[Outcome]:
        """Streams that did not end as they should."""
        return [o for o in self.outcomes if o.finish != "length" or len(o.tokens) != o.ask.sampling.max_tokens]

    def good(self, from_s: float, to_s: float) -> tuple[int, int]:
        """Requests that arrived then: how many met both targets, of how many."""
        asked = [o for o in self.outcomes if from_s <= o.ask.at_s < to_s]
        return sum(self._met(outcome) for outcome in asked), len(asked)

    def _met(self, outcome: Outcome) -> bool:
        scenario, tokens = self.scenario, len(outcome.tokens)
        if outcome.finish != "length" or outcome.first_s is None or outcome.ended_s is None:
            return False
        itl_s = (outcome.ended_s - outcome.first_s) / max(1, tokens - 1)
        return outcome.first_s - outcome.began_s <= scenario.ttft_target_s and itl_s <= (
            scenario.itl_target_s * scenario.scale
        )


def turn(scenario: Scenario, on_second: Callable[[Second], None] | None = None) -> Told:
    """Runs it to the end of its last stream."""
    told = Told(scenario)
    with _quiet():
        run_world(_run(scenario, told, on_second or (lambda _: None)))
    return told


class _NoTrace(Trace):
    """Minutes of every step's messages are of no use to anyone."""

    def note(self, who: str, what: str, /, **facts: object) -> None:
        """Not kept."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Only what went wrong is logged."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        yield
    finally:
        structlog.configure(**before)


def asks(scenario: Scenario) -> list[Ask]:
    """A Poisson stream of requests."""
    rng = random.Random(f"{scenario.seed}:turning")
    gaps = [rng.expovariate(scenario.rate_per_s) for _ in range(int(3 * scenario.rate_per_s * scenario.lasts_s) + 20)]
    found = []
    for number, at_s in enumerate(accumulate(gaps)):
        if at_s >= scenario.lasts_s:
            break
        isl, osl = scenario.shape(at_s)
        sampling = SamplingParams(max_tokens=osl, temperature=0.0, seed=number, ignore_eos=True)
        prompt = tuple(rng.choices(range(256), k=isl))
        found.append(Ask(f"client-{number}", at_s, prompt, sampling, None))
    return found


async def _run(scenario: Scenario, told: Told, on_second: Callable[[Second], None]) -> None:
    world, loop = World(scenario.seed, _NoTrace()), world_loop()
    world.problems = told.problems
    workers = _workers(scenario, world)
    deadlines = {"ttft_floor_s": 600.0, "transfer_floor_s": 600.0, "stall_floor_s": 60.0}
    itl_s = scenario.itl_target_s * scenario.scale
    planner = Planner(world, "planner-0", {"balance_roles": scenario.balance, "itl_target_s": itl_s, **deadlines})
    ingress = SimIngress(world, "ingress-0", {"request_timeout_s": 3600.0, "max_in_flight": 4096})
    services: list[Service] = [*(worker.node for worker in workers), ingress, planner, *workers]
    bucket = asyncio.create_task(MemoryBucket(world.broker.client("bucket"), Stored()).run())
    for service in services:
        service.start()
    await asyncio.sleep(START_S)
    assert all(s.runtime is not None and s.runtime.state is ProcessState.READY for s in services), "it does not start"
    began_s = loop.world_s
    watch = asyncio.create_task(_watch(workers, told, began_s, on_second))
    async with asyncio.TaskGroup() as going:
        for ask in asks(scenario):
            going.create_task(_client(ingress, ask, told))
    watch.cancel()
    for service in reversed(services):
        await service.drain()
    bucket.cancel()


def _workers(scenario: Scenario, world: World) -> list[Worker]:
    roles = [Role.PREFILL] * scenario.prefill + [Role.DECODE] * scenario.decode
    settings = {**scenario.costs, "max_waiting": 4096, "staging_wait_s": 60.0, "linger_s": 3.0, "sim_eos_chance": 0.0}
    blocks = 400_000 // scenario.scale // 16
    return [
        Worker(
            world,
            f"worker-{number}",
            role,
            Relay(world, f"node-{number}", slots=max(64, 1024 // scenario.scale)),
            kv_layout="nhd:16:fp32",
            kv_blocks=blocks,
            able=(Role.PREFILL, Role.DECODE),
            settings=settings,
        )
        for number, role in enumerate(roles)
    ]


async def _client(ingress: SimIngress, ask: Ask, told: Told) -> None:
    await asyncio.sleep(ask.at_s)
    outcome = Outcome(ask)
    told.outcomes.append(outcome)
    assert ingress.frontend is not None
    assert ingress.process is not None
    await ingress.process.life.start(serve(ingress.frontend, outcome), name=ask.name)


async def _watch(workers: Sequence[Worker], told: Told, began_s: float, on_second: Callable[[Second], None]) -> None:
    loop = world_loop()
    shown: dict[str, tuple[Role, ...]] = {}
    while True:
        beats = [worker.host.beat() for worker in workers if worker.host is not None]
        at_s = loop.world_s - began_s
        for beat in beats:
            if shown.get(beat.worker_id, beat.roles) != beat.roles:
                told.changes.append((at_s, beat.worker_id, "+".join(beat.roles)))
            shown[beat.worker_id] = beat.roles
        counted = {role: [beat.load for beat in beats if role in beat.roles] for role in Role}
        second = Second(
            at_s=at_s,
            prefill=len(counted[Role.PREFILL]),
            decode=len(counted[Role.DECODE]),
            prefilling=sum(load.running + load.waiting for load in counted[Role.PREFILL]),
            decoding=sum(load.running + load.waiting + load.loading for load in counted[Role.DECODE]),
        )
        told.seconds.append(second)
        on_second(second)
        await asyncio.sleep(TICK_S)
