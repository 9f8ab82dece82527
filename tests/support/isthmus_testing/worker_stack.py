"""A planner and real workers (sim engines) over the in-memory bus. A relay in memory stands between them, and the test
plays the ingress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from isthmus_decode.role import DecodeRole
from isthmus_planner.config import PlannerConfig
from isthmus_planner.service import PlannerService
from isthmus_prefill.role import PrefillRole
from isthmus_shared.bus.memory import MemoryBroker
from isthmus_shared.bus.port import Bus
from isthmus_shared.engines.config import EngineKind
from isthmus_shared.engines.factory import create_engine
from isthmus_shared.engines.kv_memory import MemoryKvTransfer
from isthmus_shared.engines.kv_port import KvSink, KvSource
from isthmus_shared.errors import Fault
from isthmus_shared.ids import Generation, Incarnation, IngressId, NodeId, RequestId, TransferId, WorkerId
from isthmus_shared.kv.manifest import KvManifest
from isthmus_shared.messages import subjects
from isthmus_shared.messages.base import WireMessage
from isthmus_shared.messages.health import (
    ClusterView,
    ProcessState,
    Role,
    ViewRequest,
    WorkerHeartbeat,
    WorkerLost,
)
from isthmus_shared.messages.route import Route, RouteReply, RouteRequest
from isthmus_shared.messages.work import (
    Ack,
    FinishReason,
    KvTicket,
    RelayRef,
    SamplingParams,
    SequenceEvent,
    StartDecode,
    StepEvents,
    SubmitDecode,
    SubmitPrefill,
    SubmitReply,
    WorkerRef,
)
from isthmus_shared.runtime import ServiceRuntime
from isthmus_testing import eventually
from isthmus_worker.config import WorkerConfig
from isthmus_worker.host import WorkerHost
from isthmus_worker.ports import RelayLink
from isthmus_worker.roles import RoleHandlers

WAIT_S = 20.0
PROMPT = tuple(range(40, 90))
EVENTS = subjects.ingress_events(IngressId("i"), "life")
Reply = TypeVar("Reply", bound=WireMessage)


class Hub:
    """All nodes' relays at once: a transfer that one side opens is there for the other."""

    def __init__(self) -> None:
        self.transfers: dict[tuple[TransferId, Generation], MemoryKvTransfer] = {}
        self.links: dict[WorkerId, Link] = {}

    def link(self, worker: WorkerRef) -> Link:
        node = worker.node_id
        relay = RelayRef(node_id=node, incarnation=Incarnation(f"relay-{node}"), address=f"{node}:1")
        self.links[worker.worker_id] = link = Link(self, relay)
        return link


@dataclass
class Link:
    hub: Hub
    relay: RelayRef
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: list[tuple[TransferId, Generation]] = field(default_factory=list)

    async def open_sink(
        self,
        transfer_id: TransferId,
        generation: Generation,
        manifest: KvManifest,
        *,
        deadline_s: float,
        wait_s: float,
        retain_s: float = 0.0,
    ) -> KvSink:
        transfer = MemoryKvTransfer(manifest.total_bytes)
        self.hub.transfers[transfer_id, generation] = transfer
        return transfer.sink

    async def open_source(self, ticket: KvTicket, *, deadline_s: float) -> KvSource:
        return self.hub.transfers[ticket.transfer_id, ticket.generation].source

    async def abort(self, transfer_id: TransferId, generation: Generation, fault: Fault) -> None:
        self.aborted.append((transfer_id, generation))

    def report_step(self, *, step_s: float, kv_blocks_free: int, kv_block_tokens: int) -> None:
        """Nothing here paces."""

    def report_itl(self, itl_ms: float, target_ms: float) -> None:
        """Nothing here paces."""

    async def close(self) -> None:
        self.lost.set()


@dataclass
class Worker:
    host: WorkerHost
    runtime: ServiceRuntime[WorkerConfig]
    task: asyncio.Task[None]


class Stack:
    """The cluster, and the ingress that the test plays."""

    def __init__(
        self, broker: MemoryBroker, tasks: asyncio.TaskGroup, stack: AsyncExitStack, planner: dict[str, Any]
    ) -> None:
        self.broker, self.tasks, self._stack = broker, tasks, stack
        self.hub = Hub()
        self.bus: Bus = broker.client("ingress")
        self.events: asyncio.Queue[SequenceEvent] = asyncio.Queue()
        self.messages: list[StepEvents] = []
        self.lost: list[WorkerLost] = []
        self.planner = self._runtime("planner", PlannerConfig(**({"heartbeat_interval_s": 1.0} | planner)))

    def _runtime(self, name: str, config: Any) -> ServiceRuntime[Any]:
        return ServiceRuntime(name, config, bus=self.broker.client(name), instance=name, serve_http=False)

    async def start(self) -> None:
        await self._stack.enter_async_context(self.planner)
        self.tasks.create_task(PlannerService(self.planner).run())
        self.tasks.create_task(self._collect(EVENTS))
        self.tasks.create_task(self._collect_lost())
        await eventually(lambda: self.planner.state is ProcessState.READY and EVENTS in self.broker.subscriptions)

    async def worker(
        self, name: str, role: Role, *, relay: bool = True, able: Sequence[Role] = (), **settings: Any
    ) -> Worker:
        config = WorkerConfig(
            id=WorkerId(name),
            node_id=NodeId(f"node-{name}"),
            heartbeat_interval_s=1.0,
            **({"kind": EngineKind.SIM, "kv_blocks": 64} | settings),
        )
        runtime = await self._stack.enter_async_context(self._runtime(name, config))
        me = WorkerRef(worker_id=config.id, incarnation=runtime.incarnation, node_id=config.node_id)

        async def connect() -> RelayLink:
            return self.hub.link(me)

        host = WorkerHost(
            runtime,
            create_engine(config.engine_config()),
            connect if relay else None,
            [handlers_of(role)],
            able=[handlers_of(each) for each in able],
            make_engine=lambda model: create_engine(config.engine_for(model)),
        )
        worker = Worker(host, runtime, self.tasks.create_task(host.run()))
        await eventually(lambda: runtime.state is ProcessState.READY)

        async def known() -> bool:
            view = await self.view()
            return host.worker in {ref(beat) for beat in view.workers if beat.state is ProcessState.READY}

        await until(known)
        return worker

    async def ask(self, subject: str, message: WireMessage, reply: type[Reply]) -> Reply:
        return reply.decode((await self.bus.request(subject, message.encode(), timeout_s=WAIT_S)).data)

    async def view(self) -> ClusterView:
        return await self.ask(subjects.VIEW, ViewRequest(), ClusterView)

    async def route(self, *exclude: Incarnation) -> RouteReply:
        request = RouteRequest(
            request_id=RequestId("r"), model="isthmus-demo", isl_tokens=len(PROMPT), max_osl_tokens=8, exclude=exclude
        )
        return await self.ask(subjects.ROUTE, request, RouteReply)

    async def routed(self) -> Route:
        reply = await self.route()
        assert reply.route is not None, reply.fault
        return reply.route

    async def next_event(self) -> SequenceEvent:
        async with asyncio.timeout(WAIT_S):
            return await self.events.get()

    async def rest(self) -> tuple[list[int], SequenceEvent]:
        """Tokens up to the terminal event, and that event."""
        tokens: list[int] = []
        while True:
            event = await self.next_event()
            tokens += event.token_ids
            if event.finish is not None:
                return tokens, event

    async def _collect(self, subject: str) -> None:
        async with self.bus.subscribe(subject) as subscription:
            async for message in subscription:
                step = StepEvents.decode(message.data)
                self.messages.append(step)
                for event in step.events:
                    self.events.put_nowait(event)

    async def _collect_lost(self) -> None:
        async with self.bus.subscribe(subjects.WORKER_LOST) as subscription:
            async for message in subscription:
                self.lost.append(WorkerLost.decode(message.data))


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Asks again and again; each asking is a request over the bus."""
    async with asyncio.timeout(WAIT_S):
        while not await check():
            pass


def ref(beat: WorkerHeartbeat) -> WorkerRef:
    return WorkerRef(worker_id=beat.worker_id, incarnation=beat.incarnation, node_id=beat.node_id)


def handlers_of(role: Role) -> RoleHandlers:
    return PrefillRole(1.0) if role is Role.PREFILL else DecodeRole()


@asynccontextmanager
async def cluster(**planner: Any) -> AsyncIterator[Stack]:
    """`planner`: its settings."""
    async with AsyncExitStack() as contexts:
        tasks = asyncio.TaskGroup()
        await contexts.enter_async_context(_cancelled_at_end(tasks))
        stack = Stack(MemoryBroker(), tasks, contexts, planner)
        await stack.start()
        yield stack


@asynccontextmanager
async def _cancelled_at_end(group: asyncio.TaskGroup) -> AsyncIterator[None]:
    class _Over(Exception):
        pass

    try:
        async with group:
            yield
            raise _Over
    except* _Over:
        pass


def prefill(route: Route, generation: int = 1, **fields: Any) -> SubmitPrefill:
    assert route.prefill is not None
    given: dict[str, Any] = {
        "request_id": RequestId("r"),
        "generation": generation,
        "incarnation": route.prefill.incarnation,
        "transfer_id": TransferId("t"),
        "events_subject": EVENTS,
        "token_ids": PROMPT,
        "sampling": SamplingParams(max_tokens=8),
        "deadline_s": 30.0,
    }
    return SubmitPrefill(**(given | fields))


def decode(worker: WorkerRef, ticket: KvTicket | None, generation: int = 1, **fields: Any) -> SubmitDecode:
    given: dict[str, Any] = {
        "request_id": RequestId("r"),
        "generation": generation,
        "incarnation": worker.incarnation,
        "events_subject": EVENTS,
        "token_ids": PROMPT,
        "sampling": SamplingParams(max_tokens=8),
        "ticket": ticket,
        "transfer_deadline_s": 30.0,
    }
    return SubmitDecode(**(given | fields))


async def crossed(stack: Stack, route: Route) -> tuple[list[int], SequenceEvent]:
    """The whole saga of one request."""
    assert route.prefill is not None
    first = await stack.ask(subjects.worker_prefill(route.prefill.worker_id), prefill(route), SubmitReply)
    assert first.ticket is not None, first.fault
    second = await stack.ask(
        subjects.worker_decode(route.decode.worker_id), decode(route.decode, first.ticket), SubmitReply
    )
    assert second.fault is None
    handoff = await stack.next_event()
    assert (handoff.finish, handoff.output_index, len(handoff.token_ids)) == (FinishReason.HANDOFF, 0, 1)
    start = StartDecode(
        request_id=RequestId("r"),
        generation=Generation(1),
        incarnation=route.decode.incarnation,
        first_token_id=handoff.token_ids[0],
    )
    assert (await stack.ask(subjects.worker_start(route.decode.worker_id), start, Ack)).fault is None
    tokens, end = await stack.rest()
    return [*handoff.token_ids, *tokens], end


async def alone(stack: Stack, worker: WorkerRef) -> list[int]:
    """The same request, aggregated."""
    submit = decode(worker, None, request_id=RequestId("alone"))
    assert (await stack.ask(subjects.worker_decode(worker.worker_id), submit, SubmitReply)).fault is None
    return (await stack.rest())[0]
