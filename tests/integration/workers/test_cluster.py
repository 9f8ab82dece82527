"""A planner and real workers (sim engines) over the in-memory bus. A relay in memory stands between them, and the test
plays the ingress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
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
from isthmus_shared.engines.reference.checkpoint import ensure_tiny_checkpoint
from isthmus_shared.errors import Fault
from isthmus_shared.ids import Generation, Incarnation, IngressId, NodeId, RequestId, TransferId, WorkerId
from isthmus_shared.kv.manifest import KvManifest
from isthmus_shared.messages import subjects
from isthmus_shared.messages.base import WireMessage
from isthmus_shared.messages.health import (
    ClusterView,
    IngressHeartbeat,
    ProcessState,
    Role,
    ViewRequest,
    WorkerHeartbeat,
    WorkerLost,
)
from isthmus_shared.messages.route import Mode, Route, RouteReply, RouteRequest
from isthmus_shared.messages.work import (
    Ack,
    Cancel,
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
from isthmus_worker.liveness import IngressLife
from isthmus_worker.ports import RelayLink

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
        self, transfer_id: TransferId, generation: Generation, manifest: KvManifest, *, deadline_s: float, wait_s: float
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

    def __init__(self, broker: MemoryBroker, tasks: asyncio.TaskGroup, stack: AsyncExitStack) -> None:
        self.broker, self.tasks, self._stack = broker, tasks, stack
        self.hub = Hub()
        self.bus: Bus = broker.client("ingress")
        self.events: asyncio.Queue[SequenceEvent] = asyncio.Queue()
        self.messages: list[StepEvents] = []
        self.lost: list[WorkerLost] = []
        self.planner = self._runtime("planner", PlannerConfig(heartbeat_interval_s=1.0))

    def _runtime(self, name: str, config: Any) -> ServiceRuntime[Any]:
        return ServiceRuntime(name, config, bus=self.broker.client(name), instance=name, serve_http=False)

    async def start(self) -> None:
        await self._stack.enter_async_context(self.planner)
        self.tasks.create_task(PlannerService(self.planner).run())
        self.tasks.create_task(self._collect(EVENTS))
        self.tasks.create_task(self._collect_lost())
        await eventually(lambda: self.planner.state is ProcessState.READY and EVENTS in self.broker.subscriptions)

    async def worker(self, name: str, role: Role, *, relay: bool = True, **settings: Any) -> Worker:
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

        handlers = PrefillRole(1.0) if role is Role.PREFILL else DecodeRole()
        host = WorkerHost(runtime, create_engine(config.engine_config()), connect if relay else None, [handlers])
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


@asynccontextmanager
async def cluster() -> AsyncIterator[Stack]:
    async with AsyncExitStack() as contexts:
        tasks = asyncio.TaskGroup()
        await contexts.enter_async_context(_cancelled_at_end(tasks))
        stack = Stack(MemoryBroker(), tasks, contexts)
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


async def test_a_routed_request_crosses_and_gives_the_tokens_of_an_aggregated_one() -> None:
    async with cluster() as stack:
        await stack.worker("p", Role.PREFILL)
        decoder = await stack.worker("d", Role.DECODE, kv_layout="hnd:64:fp32")
        route = await stack.routed()
        assert route.mode is Mode.DISAGGREGATED
        tokens, end = await crossed(stack, route)
        assert end.finish is FinishReason.LENGTH
        assert len(tokens) == 8
        assert tokens == await alone(stack, decoder.host.worker)
        assert decoder.host.sessions.idle.is_set()
        (transfer,) = stack.hub.transfers.values()
        told = [message.step for message in stack.messages if message.worker == decoder.host.worker and message.step]
        assert [step.kv_loads for step in told[:2]] == [1, 0], "the first step here took the KV in"
        assert [step.number for step in told] == list(range(1, len(told) + 1))
        assert all(before.ended_s <= after.ended_s for before, after in pairwise(told))
        assert (transfer.sealed, transfer.released) == (True, True)


async def test_fp8_of_one_vendor_is_decoded_by_the_other(tmp_path: Path) -> None:
    async with cluster() as stack:
        own = {"kind": EngineKind.REFERENCE, "model": ensure_tiny_checkpoint(tmp_path / "tiny")}
        await stack.worker("p", Role.PREFILL, kv_layout="nvidia-flash:fp8_e4m3fn", **own)
        decoder = await stack.worker("d", Role.DECODE, kv_layout="amd-shuffle:fp8_e4m3fnuz", **own)
        route = await stack.routed()
        assert route.mode is Mode.DISAGGREGATED, "both have one KV form"
        tokens, end = await crossed(stack, route)
        assert end.finish is FinishReason.LENGTH
        assert tokens == await alone(stack, decoder.host.worker)


async def test_the_planner_learns_from_the_steps_that_workers_tell() -> None:
    async with cluster() as stack:
        decoder = await stack.worker("d", Role.DECODE)
        for _ in range(2):
            await alone(stack, decoder.host.worker)

        async def told() -> bool:
            (beat,) = (await stack.view()).workers
            return beat.load.steps_total >= 10

        await until(told)
        (beat,) = (await stack.view()).workers
        assert all(sample.step_s > 0 for sample in beat.load.steps)
        assert 1 in {sample.decode_sequences for sample in beat.load.steps}
        predicted = (await stack.routed()).predicted
        usual_s = sorted(sample.step_s for sample in beat.load.steps)[len(beat.load.steps) // 2]
        assert usual_s / 2 < predicted.itl_p50_s < 2 * usual_s


async def test_many_sequences_of_one_step_travel_in_one_message() -> None:
    async with cluster() as stack:
        worker = (await stack.worker("d", Role.DECODE)).host.worker
        for number in range(6):
            submit = decode(worker, None, request_id=RequestId(f"r{number}"))
            await stack.ask(subjects.worker_decode(worker.worker_id), submit, SubmitReply)
        ended = 0
        while ended < 6:
            ended += (await stack.next_event()).finish is not None
        assert max(len(message.events) for message in stack.messages) == 6
        assert len(stack.messages) < 6 * 8


async def test_a_worker_without_its_relay_serves_alone_and_is_paired_again_when_the_relay_is_back() -> None:
    async with cluster() as stack:
        await stack.worker("p", Role.PREFILL)
        decoder = await stack.worker("d", Role.DECODE)
        first = stack.hub.links[WorkerId("d")]
        first.lost.set()
        modes = [Mode.AGGREGATED, Mode.DISAGGREGATED]

        async def mode_reached() -> bool:
            if (await stack.routed()).mode is modes[0]:
                modes.pop(0)
            return not modes

        await until(mode_reached)
        assert stack.hub.links[WorkerId("d")] is not first
        assert decoder.runtime.state is ProcessState.READY


async def test_a_draining_worker_finishes_what_runs_refuses_the_rest_and_says_farewell() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE)
        subject = subjects.worker_decode(worker.host.worker.worker_id)
        await stack.ask(subject, decode(worker.host.worker, None), SubmitReply)
        await stack.next_event()
        worker.runtime.stopping.set()
        await eventually(lambda: worker.runtime.state is ProcessState.DRAINING)
        late = await stack.ask(subject, decode(worker.host.worker, None, request_id=RequestId("late")), SubmitReply)
        assert late.fault is not None
        assert late.fault.code == "draining"
        tokens, end = await stack.rest()
        assert (end.finish, len(tokens)) == (FinishReason.LENGTH, 7)
        async with asyncio.timeout(WAIT_S):
            await worker.task
        await eventually(lambda: bool(stack.lost))
        assert (stack.lost[0].worker, stack.lost[0].why) == (worker.host.worker, "draining")
        refused = await stack.route()
        assert refused.fault is not None
        assert refused.fault.code == "unavailable"


async def test_a_drain_has_an_end_even_if_its_requests_have_none() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE, drain_s=0.05, sim_decode_base_s=0.02)
        submit = decode(worker.host.worker, None, sampling=SamplingParams(max_tokens=900, ignore_eos=True))
        await stack.ask(subjects.worker_decode(WorkerId("d")), submit, SubmitReply)
        await stack.next_event()
        worker.runtime.stopping.set()
        tokens, end = await stack.rest()
        assert end.fault is not None
        assert (end.finish, end.fault.code) == (FinishReason.ERROR, "draining")
        assert end.output_index == 1 + len(tokens), "where its ingress waits, or the fault would pass for a duplicate"
        async with asyncio.timeout(WAIT_S):
            await worker.task


async def test_a_worker_that_falls_silent_is_reported_and_no_longer_routed_to() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE)
        worker.task.cancel()
        await eventually(lambda: bool(stack.lost))
        assert (await stack.view()).workers == ()


async def test_requests_of_an_ingress_that_is_gone_are_aborted() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE, sim_decode_base_s=0.02)
        worker.host.sessions.life = IngressLife(lost_s=1.0)
        endless = SamplingParams(max_tokens=900, ignore_eos=True)
        subject = subjects.worker_decode(WorkerId("d"))
        await stack.ask(subject, decode(worker.host.worker, None, sampling=endless), SubmitReply)
        kept = decode(worker.host.worker, None, sampling=endless, request_id=RequestId("k"), events_subject="other")
        await stack.ask(subject, kept, SubmitReply)
        beat = IngressHeartbeat(
            incarnation=Incarnation("x"),
            state=ProcessState.READY,
            interval_s=0.05,
            ingress_id=IngressId("o"),
            events_subject="other",
            requests_in_flight=1,
        )
        held = worker.host.sessions.requests

        async def ended() -> bool:
            await stack.bus.publish(subjects.HEARTBEAT_INGRESS, beat.encode())
            await stack.view()
            return held.find(RequestId("r"), Generation(1)) is None

        await until(ended)
        assert held.find(RequestId("k"), Generation(1)) is not None


async def test_a_cancel_frees_the_engine_and_both_ends_of_the_transfer() -> None:
    async with cluster() as stack:
        prefiller = await stack.worker("p", Role.PREFILL)
        decoder = await stack.worker("d", Role.DECODE)
        route = await stack.routed()
        reply = await stack.ask(subjects.worker_prefill(WorkerId("p")), prefill(route), SubmitReply)
        await stack.ask(subjects.worker_decode(WorkerId("d")), decode(route.decode, reply.ticket), SubmitReply)
        await stack.next_event()
        for worker in (prefiller.host.worker, decoder.host.worker):
            message = Cancel(request_id=RequestId("r"), generation=Generation(1), incarnation=worker.incarnation)
            ack = await stack.ask(subjects.worker_cancel(worker.worker_id), message, Ack)
            assert ack.fault is None
        await eventually(lambda: prefiller.host.sessions.idle.is_set() and decoder.host.sessions.idle.is_set())
        for name in ("p", "d"):
            assert stack.hub.links[WorkerId(name)].aborted == [("t", 1)]
        assert len(decoder.host.sessions.requests) == len(prefiller.host.sessions.requests) == 0
        for worker_beat in (prefiller.host.beat(), decoder.host.beat()):
            assert worker_beat.load.kv_blocks_free == worker_beat.load.kv_blocks_total


async def test_a_role_can_be_taken_away_and_given_back_while_its_streams_run_on() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE, sim_decode_base_s=0.02)
        await stack.ask(subjects.worker_decode(WorkerId("d")), decode(worker.host.worker, None), SubmitReply)
        worker.host.detach(Role.DECODE)
        tokens, end = await stack.rest()
        assert (len(tokens), end.finish) == (8, FinishReason.LENGTH)
        assert worker.host.beat().roles == ()
        await worker.host.attach(DecodeRole())
        assert len(await alone(stack, worker.host.worker)) == 8


async def test_an_outage_of_the_bus_in_mid_stream_leaves_no_gap() -> None:
    async with cluster() as stack:
        worker = await stack.worker("d", Role.DECODE, sim_decode_base_s=0.01)
        submit = decode(worker.host.worker, None, sampling=SamplingParams(max_tokens=20, ignore_eos=True))
        await stack.ask(subjects.worker_decode(WorkerId("d")), submit, SubmitReply)
        indexes = [(await stack.next_event()).output_index]
        stack.broker.disconnect()
        await eventually(lambda: worker.host.sessions.idle.is_set())
        assert stack.events.qsize() < 10, "the rest was computed while nobody could hear it"
        stack.broker.reconnect()
        while len(indexes) < 20:
            indexes.append((await stack.next_event()).output_index)
        assert indexes == list(range(20))
