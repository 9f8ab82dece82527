"""Is the cluster ready? Asked of the planner, which hears everyone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Self

import httpx

from isthmus_cli.dialling import dial
from isthmus_cli.reporter import Reporter
from isthmus_cli.spec import ClusterSpec
from isthmus_shared.bus.port import Bus
from isthmus_shared.errors import DeadlineExceeded, NoResponders, Unavailable
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import ClusterView, ProcessState, ViewRequest

POLL_S = 0.1
VIEW_TIMEOUT_S = 2.0


@dataclass(slots=True)
class Watch:
    """Names that are still waited for."""

    workers: dict[str, bool]
    """Worker → whether it is to have a relay."""
    relays: set[str]
    ingress: bool = True
    ready: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, spec: ClusterSpec) -> Self:
        return cls(
            workers={worker.id: node.relay is not None for node in spec.nodes for worker in node.workers},
            relays={node.id for node in spec.nodes if node.relay is not None},
        )

    def take(self, view: ClusterView) -> list[str]:
        """What has become ready with this view, in words."""
        news = [f"relay-{beat.relay.node_id}" for beat in view.relays if beat.state is ProcessState.READY]
        news += [
            beat.worker_id
            for beat in view.workers
            if beat.state is ProcessState.READY and (beat.relay is not None or not self.workers.get(beat.worker_id))
        ]
        news += ["ingress" for beat in view.ingresses if beat.state is ProcessState.READY]
        fresh = [name for name in news if name in self.expected and name not in self.ready]
        self.ready.update(fresh)
        return fresh

    @property
    def expected(self) -> set[str]:
        return {*self.workers, *(f"relay-{node}" for node in self.relays), "ingress"}

    @property
    def complete(self) -> bool:
        return self.ready == self.expected

    def missing_text(self) -> str:
        missing = ", ".join(sorted(self.expected - self.ready))
        return f"still waiting for {missing or 'the endpoint to hear of a worker'}"


async def cluster_view(bus: Bus) -> ClusterView:
    """What the planner knows; raises `Unavailable` or `DeadlineExceeded` when it does not answer."""
    try:
        reply = await bus.request(subjects.VIEW, ViewRequest().encode(), timeout_s=VIEW_TIMEOUT_S)
    except NoResponders as error:
        raise Unavailable(
            "the planner does not answer", why="it is starting, or gone", todo="see its log if that lasts"
        ) from error
    return ClusterView.decode(reply.data)


async def watch_until_ready(bus_url: str, http_url: str, watch: Watch, reporter: Reporter) -> None:
    """Until the planner has heard everyone, and the endpoint would take a request."""
    bus = await dial(bus_url, name="isthmus up")
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with bus:
        while not watch.complete:
            reporter.waiting(f"{loop.time() - began_s:.0f} s, {watch.missing_text()}")
            try:
                fresh = watch.take(await cluster_view(bus))
            except (Unavailable, DeadlineExceeded):  # the planner is still starting
                fresh = []
            for name in fresh:
                reporter.say("process.ready", f"{name} is ready", name=name)
            await asyncio.sleep(POLL_S)
    reporter.waiting(watch.missing_text())
    await endpoint_ready(http_url)


async def endpoint_ready(http_url: str) -> None:
    """Until the ingress has heard of a worker itself, up to a heartbeat after it began to listen; until then it
    refuses requests."""
    async with httpx.AsyncClient(timeout=VIEW_TIMEOUT_S, trust_env=False) as http:
        while True:
            try:
                if (await http.get(f"{http_url}/ready")).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:  # it is being started again
                pass
            await asyncio.sleep(POLL_S)
