"""The whole cluster in one process and virtual time, its clients, and the rules that every run must keep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from isthmus_shared.messages.health import ProcessState, Role
from isthmus_sim.bucket import MemoryBucket, Stored
from isthmus_sim.load import Ask, Outcome, serve
from isthmus_sim.loop import world_loop
from isthmus_sim.process import Service, World
from isthmus_sim.relay import Relay
from isthmus_sim.services import REQUEST_TIMEOUT_S, MakeRunner, Planner, SimIngress, Worker
from isthmus_sim.trace import Trace
from isthmus_worker.liveness import INGRESS_LOST_S
from isthmus_worker.requests import Phase

START_S = 10.0
FREED_S = 0.1
"""In an undisturbed cluster, from a request's end until nobody holds anything for it."""
PROGRESS_S = 2.0
"""Longest request of an undisturbed cluster, whatever else is asked for: five times what any of them takes."""
LEASE_S = REQUEST_TIMEOUT_S + INGRESS_LOST_S + 1.0
"""Whatever was lost on the way: by then every deadline and every dead ingress' silence has run out."""
POLL_S = 0.01
LEADERS_S = 0.02
LOOK_S = 0.25
"""Between two looks at everything."""


ROLES_END_SOON = {"linger_s": 1.5}
"""Above the longest wait for staging, and short enough for several changes in one run."""


@dataclass(frozen=True)
class Size:
    """`slots`: of each relay's pool; the smallest stages one of the longest prompts at a time. `skew`: of clocks.
    `able`: roles that every worker may be assigned beside its own."""

    slots: int = 64
    planners: int = 1
    ingresses: int = 1
    skew: float = 0.0
    able: tuple[Role, ...] = ()


class Cluster:
    """Two prefill and two decode workers of different layouts; one or two planners and ingresses."""

    def __init__(
        self, seed: int, trace: Trace, size: Size | None = None, *, make_runner: MakeRunner | None = None
    ) -> None:
        size = size or Size()
        self.size = size
        self.world = world = World(seed, trace, skew=size.skew)
        self.nodes = [Relay(world, name, slots=size.slots) for name in ("node-p0", "node-p1", "node-d0", "node-d1")]
        forms = (("nhd:16:fp32", 120), ("nhd:16:fp32", 60), ("hnd:64:fp32", 40), ("hnd:64:fp32", 16))
        names = (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE))
        self.workers = [
            Worker(
                world,
                name,
                role,
                node,
                kv_layout=layout,
                kv_blocks=blocks,
                make_runner=make_runner,
                able=size.able,
                settings=ROLES_END_SOON,
            )
            for (name, role), node, (layout, blocks) in zip(names, self.nodes, forms, strict=True)
        ]
        self.planners = [Planner(world, f"planner-{number}") for number in range(size.planners)]
        self.ingresses = [SimIngress(world, f"ingress-{number}") for number in range(size.ingresses)]
        self._bucket: asyncio.Task[None]
        self.stored = Stored()
        self.outcomes: list[Outcome] = []
        self.outages = 0
        self._clients: dict[asyncio.Task[None], tuple[SimIngress, Outcome]] = {}
        self._disturbances = 0
        self._disturbed_until_s = 0.0
        self._loop = world_loop()

    @property
    def services(self) -> list[Service]:
        return [*self.ingresses, *self.workers, *self.planners, *self.nodes]

    async def start(self) -> None:
        self._bucket = asyncio.create_task(
            MemoryBucket(self.world.broker.client("bucket"), self.stored).run(), name="bucket"
        )
        for each in self.services:
            each.start()
        assert await self.settled(self._ready), "the cluster does not start"
        await asyncio.sleep(1.0)  # everyone has heard everyone's heartbeat

    async def settled(
        self, condition: Callable[[], bool], *, within_s: float = START_S, poll_s: float = POLL_S
    ) -> bool:
        """Whether that becomes true in time."""
        until_s = self._loop.time() + within_s
        while not condition():
            if self._loop.time() > until_s:
                return False
            await asyncio.sleep(poll_s)
        return True

    def _ready(self) -> bool:
        runtimes = [each.runtime for each in self.services]
        return all(runtime is not None and runtime.state is ProcessState.READY for runtime in runtimes)

    # -- clients

    async def ask(self, ask: Ask) -> Outcome:
        """One client's request, `ask.at_s` from now, through the first ingress that is there."""
        await asyncio.sleep(ask.at_s)
        outcome = Outcome(ask)
        self.outcomes.append(outcome)
        number = ask.sampling.seed
        while True:
            order = [*self.ingresses[number % len(self.ingresses) :], *self.ingresses]
            ingress = next((each for each in order if each.frontend is not None), None)
            if ingress is not None and ingress.frontend is not None:
                break
            await asyncio.sleep(POLL_S)
        calm_since_s = self._loop.time() if self._calm else None
        assert ingress.process is not None
        client = ingress.process.life.start(serve(ingress.frontend, outcome), name=ask.name)
        self._clients[client] = ingress, outcome
        self.world.trace.note(ask.name, "asks", via=ingress.name, isl=len(ask.prompt), osl=ask.sampling.max_tokens)
        await asyncio.wait({client})
        del self._clients[client]
        if not client.cancelled() and (bug := client.exception()) is not None:
            self.world.problems.append(f"{ask.name}: {bug!r}")
        code = outcome.error.code if outcome.error else outcome.finish
        self.world.trace.note(ask.name, "ended", how=code, tokens=len(outcome.tokens), crashed=outcome.crashed)
        await asyncio.sleep(FREED_S)
        if calm_since_s is not None and self._calm and self._disturbed_until_s <= calm_since_s:
            self.world.problems += [f"{FREED_S} s after {ask.name} ended, {held}" for held in self._held_for(ask)]
            if outcome.took_s > PROGRESS_S:
                self.world.problems.append(f"{ask.name} took {outcome.took_s:.3f} s in an undisturbed cluster")
        return outcome

    def cut_clients(self, ingress: SimIngress) -> None:
        """Their ingress dies: their connections close."""
        for client, (theirs, outcome) in self._clients.items():
            if theirs is ingress:
                outcome.crashed = True
                client.cancel()

    def _held_for(self, ask: Ask) -> list[str]:
        """What workers and relays hold for a request that is over. (Staged records are leases on nothing.)"""
        found, ids = [], set()
        for worker in self.workers:
            for record in worker.host.sessions.requests.everything() if worker.host is not None else ():
                asked = self.world.asked.get(record.request_id)
                if asked == ask.sampling.seed and record.phase is not Phase.STAGED:
                    found.append(f"{worker.name} holds {record.request_id} generation {record.generation}")
        ids = {transfer for transfer, seed in self.world.transfers.items() if seed == ask.sampling.seed}
        for node in self.nodes:
            keys = node.daemon.open_keys if node.daemon is not None else ()
            found += [f"{node.name} has {key} open" for _, key in keys if key.transfer_id in ids]
        return found

    # -- disturbances

    @property
    def _calm(self) -> bool:
        return self._disturbances == 0 and self._loop.time() >= self._disturbed_until_s

    @contextmanager
    def disturbed(self, name: str, healed_s: float) -> Iterator[Callable[[str], None]]:
        """While something is wrong (and `healed_s` longer) nobody is held to the times of a healthy cluster."""
        self._disturbances += 1
        try:
            yield lambda what: self.world.trace.note("FAULT", f"{name} {what}")
        finally:
            self._disturbances -= 1
            self._disturbed_until_s = self._loop.time() + healed_s

    # -- the end

    async def check_nothing_is_left(self) -> None:
        """Within the lease bound everything is given back. Says what is not."""
        if not await self.settled(lambda: next(self._left(), None) is None, within_s=LEASE_S, poll_s=LOOK_S):
            self.world.problems += [f"after {LEASE_S:g} s {what}" for what in self._left()]

    def _left(self) -> Iterator[str]:
        for ingress in self.ingresses:
            if ingress.hub is None or ingress.hub.running:
                yield f"{ingress.name} runs sagas"
        for worker in self.workers:
            yield from _left_in(worker)
        for node in self.nodes:
            yield from node.daemon.problems() if node.daemon is not None else [f"{node.name} has no relay"]

    async def watch_leaders(self) -> None:
        """Until cancelled: at most one planner leads, and no epoch comes again."""
        last, epoch = "", 0
        while True:
            leading = [(each.name, each.life, each.leads) for each in self.planners if each.leads is not None]
            if len(leading) > 1:
                self.world.problems.append(f"several planners lead: {leading}")
            for _, life, now in leading:
                assert now is not None
                if now < epoch or (now == epoch and life != last):
                    self.world.problems.append(f"{life} leads with epoch {now} after {last} with {epoch}")
                last, epoch = life, now
            await asyncio.sleep(LEADERS_S)

    async def stop(self) -> None:
        """An orderly end; then no task may be left."""
        stopping = [asyncio.create_task(each.drain(), name=each.name) for each in self.services]
        _, running = await asyncio.wait(stopping, timeout=START_S)
        self.world.problems += [f"{task.get_name()} does not stop" for task in running]
        self._bucket.cancel()
        if not await self.settled(lambda: not _others(), poll_s=LOOK_S):  # what killed processes had begun ends too
            self.world.problems += sorted(f"task {task.get_name()} is left: {task.get_coro()}" for task in _others())


def _left_in(worker: Worker) -> Iterator[str]:
    host, engine = worker.host, worker.engine
    if host is None or engine is None:
        yield f"{worker.name} is not running"
        return
    engine.check_invariants()
    host.sessions.requests.check_invariants()
    for record in host.sessions.requests.everything():
        yield f"{worker.name} holds {record.request_id} generation {record.generation}, {record.phase.value}"
    load = engine.load()
    if (load.running, load.waiting, load.loading) != (0, 0, 0):
        yield f"{worker.name}'s engine has sequences: {load}"
    if load.kv_blocks_free != host.beat().load.kv_blocks_total:
        yield f"{worker.name} has {load.kv_blocks_free} blocks free"
    if not host.sessions.idle.is_set():
        yield f"{worker.name} is not idle"


def _others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}
