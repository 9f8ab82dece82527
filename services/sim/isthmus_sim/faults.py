"""What goes wrong in a simulation, and when. Each fault heals itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from isthmus_sim.bus import CALM_DELAY_S
from isthmus_sim.cluster import Cluster


class Fault(StrEnum):
    WORKER_CRASH = "worker_crash"
    WORKER_RESTART = "worker_restart"
    PLANNER_CRASH = "planner_crash"
    INGRESS_CRASH = "ingress_crash"
    BUS_OUTAGE = "bus_outage"
    SLOW_WORKER = "slow_worker"
    RELAY_LOSS = "relay_loss"
    LANE_LOSS = "lane_loss"
    DELAYS = "delays"
    SHED_EVENTS = "shed_events"
    REPEATED_EVENTS = "repeated_events"
    LINGERING_SUBMITS = "lingering_submits"
    CORRUPTION = "corruption"


SLOWNESS = 50.0
HEALED_S = 0.5
"""After a fault is over its traces are still about: a delayed message, a worker that is starting."""


@dataclass(frozen=True)
class Planned:
    fault: Fault
    at_s: float
    lasts_s: float
    pick: int
    """Which of the candidates it hits."""
    told: bool
    """Worker crash: whether its relay says so."""


def plan(rng: random.Random, *, over_s: float) -> list[Planned]:
    """From none (one run in eight) to six."""
    count = rng.choice((0, 1, 1, 2, 3, 4, 5, 6))
    kinds = [*Fault, Fault.WORKER_CRASH, Fault.WORKER_CRASH]
    return sorted(
        (
            Planned(
                rng.choice(kinds),
                rng.uniform(0.05, over_s),
                rng.uniform(0.1, 3.0),
                rng.randrange(1000),
                rng.random() < 0.5,
            )
            for _ in range(count)
        ),
        key=lambda planned: planned.at_s,
    )


async def inflict(cluster: Cluster, planned: Planned) -> None:
    """Waits for its time, does it, and heals it."""
    await asyncio.sleep(planned.at_s)
    with cluster.disturbed(planned.fault, HEALED_S) as trace:
        trace(f"lasts {planned.lasts_s:.3f} s, told {planned.told}")
        await _HOW[planned.fault](cluster, planned)
        trace("healed")


async def _worker_crash(cluster: Cluster, planned: Planned) -> None:
    alive = [worker for worker in cluster.workers if worker.process is not None]
    if not alive:
        return
    worker = alive[planned.pick % len(alive)]
    await worker.crash(told=planned.told)
    await asyncio.sleep(planned.lasts_s)
    worker.start()
    await cluster.settled(lambda: worker.runtime is not None and not worker.runtime.problems())


async def _worker_restart(cluster: Cluster, planned: Planned) -> None:
    """In order: it drains first."""
    ready = [worker for worker in cluster.workers if worker.runtime is not None and not worker.runtime.problems()]
    if not ready:
        return
    worker = ready[planned.pick % len(ready)]
    process = worker.process
    await worker.drain()
    await asyncio.sleep(planned.lasts_s)
    if worker.process is process:  # else it crashed while it drained, and has been started anew
        worker.start()
    await cluster.settled(lambda: worker.runtime is not None and not worker.runtime.problems())


async def _planner_crash(cluster: Cluster, planned: Planned) -> None:
    alive = [planner for planner in cluster.planners if planner.process is not None]
    if not alive:
        return
    planner = alive[planned.pick % len(alive)]
    await planner.crash()
    await asyncio.sleep(planned.lasts_s)
    planner.start()
    await asyncio.sleep(1.0)  # it hears everyone within two beats


async def _ingress_crash(cluster: Cluster, planned: Planned) -> None:
    alive = [ingress for ingress in cluster.ingresses if ingress.process is not None]
    if not alive:
        return
    ingress = alive[planned.pick % len(alive)]
    cluster.cut_clients(ingress)
    await ingress.crash()
    await asyncio.sleep(planned.lasts_s)
    ingress.start()


async def _bus_outage(cluster: Cluster, planned: Planned) -> None:
    cluster.outages += 1
    cluster.world.broker.disconnect()
    await asyncio.sleep(planned.lasts_s)
    cluster.outages -= 1
    if cluster.outages == 0:
        cluster.world.broker.reconnect()


async def _slow_worker(cluster: Cluster, planned: Planned) -> None:
    worker = cluster.workers[planned.pick % len(cluster.workers)]
    runner = worker.runner
    if runner is not None:
        runner.slowness = SLOWNESS
        await asyncio.sleep(planned.lasts_s)
        runner.slowness = 1.0


async def _relay_loss(cluster: Cluster, planned: Planned) -> None:
    nodes = [node for node in cluster.nodes if node.relay is not None]
    if not nodes:
        return
    node = nodes[planned.pick % len(nodes)]
    node.lose()
    await asyncio.sleep(planned.lasts_s)
    node.start()
    await asyncio.sleep(2.5)  # the longest backoff of a worker that attaches again


async def _lane_loss(cluster: Cluster, planned: Planned) -> None:
    relay = cluster.nodes[planned.pick % len(cluster.nodes)].relay
    if relay is not None:
        cluster.world.fabric.cut(relay)
        await asyncio.sleep(0.01)


async def _delays(cluster: Cluster, planned: Planned) -> None:
    weather = cluster.world.weather
    weather.delay_s = (0.01, 0.05, 0.3)[planned.pick % 3]
    await asyncio.sleep(planned.lasts_s)
    weather.delay_s = CALM_DELAY_S


async def _shed_events(cluster: Cluster, planned: Planned) -> None:
    cluster.world.weather.shed_chance = (0.01, 0.1)[planned.pick % 2]
    await asyncio.sleep(planned.lasts_s)
    cluster.world.weather.shed_chance = 0.0


async def _repeated_events(cluster: Cluster, planned: Planned) -> None:
    cluster.world.weather.repeat_chance = 0.3
    await asyncio.sleep(planned.lasts_s)
    cluster.world.weather.repeat_chance = 0.0


async def _lingering_submits(cluster: Cluster, planned: Planned) -> None:
    cluster.world.weather.linger_chance = 0.3
    await asyncio.sleep(planned.lasts_s)
    cluster.world.weather.linger_chance = 0.0
    await asyncio.sleep(1.0)


async def _corruption(cluster: Cluster, planned: Planned) -> None:
    cluster.world.fabric.corrupt_chance = 0.2
    await asyncio.sleep(planned.lasts_s)
    cluster.world.fabric.corrupt_chance = 0.0


_HOW: dict[Fault, Callable[[Cluster, Planned], Awaitable[None]]] = {
    Fault.WORKER_CRASH: _worker_crash,
    Fault.WORKER_RESTART: _worker_restart,
    Fault.PLANNER_CRASH: _planner_crash,
    Fault.INGRESS_CRASH: _ingress_crash,
    Fault.BUS_OUTAGE: _bus_outage,
    Fault.SLOW_WORKER: _slow_worker,
    Fault.RELAY_LOSS: _relay_loss,
    Fault.LANE_LOSS: _lane_loss,
    Fault.DELAYS: _delays,
    Fault.SHED_EVENTS: _shed_events,
    Fault.REPEATED_EVENTS: _repeated_events,
    Fault.LINGERING_SUBMITS: _lingering_submits,
    Fault.CORRUPTION: _corruption,
}
