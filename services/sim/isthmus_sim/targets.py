"""Which process a fault hits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from isthmus_sim.cluster import Cluster
from isthmus_sim.faults import Planned
from isthmus_sim.process import Service

S = TypeVar("S", bound=Service)


def one_of(services: Sequence[S], planned: Planned) -> S | None:
    """One that runs."""
    alive = [each for each in services if each.process is not None and not each.process.task.done()]
    return alive[planned.pick % len(alive)] if alive else None


def anyone(cluster: Cluster, planned: Planned) -> Service | None:
    """Workers as often as all others together."""
    return one_of([*cluster.workers, *cluster.workers, *cluster.nodes, *cluster.planners, *cluster.ingresses], planned)


async def back(cluster: Cluster, service: Service) -> None:
    await cluster.settled(lambda: service.ready)
