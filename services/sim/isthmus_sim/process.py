"""The services as processes of a simulated cluster: each has its own bus client and can vanish at any moment."""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import tokenizers
from tokenizers import decoders, models

from isthmus_decode.role import DecodeRole
from isthmus_ingress.cancels import Cancels
from isthmus_ingress.config import IngressConfig
from isthmus_ingress.driver import Deps
from isthmus_ingress.exchange import Limits
from isthmus_ingress.frontend import Frontend
from isthmus_ingress.hub import Hub
from isthmus_ingress.prepare import Preparer
from isthmus_ingress.releases import Releases
from isthmus_ingress.roster import Roster
from isthmus_ingress.text import ModelText, Tokenizer, byte_level_alphabet
from isthmus_planner.config import PlannerConfig
from isthmus_planner.service import PlannerService
from isthmus_prefill.role import PrefillRole
from isthmus_shared.bus.memory import MemoryBroker
from isthmus_shared.config import ServiceConfig
from isthmus_shared.engines.batching import BatchingEngine
from isthmus_shared.engines.config import EngineKind
from isthmus_shared.engines.runner_port import RunnerInfo, StepResult
from isthmus_shared.engines.sequence import Batch
from isthmus_shared.engines.sim import SimRunner
from isthmus_shared.errors import BusDisconnected, PartyLost
from isthmus_shared.ids import Incarnation, IngressId, NodeId, RequestId, TransferId, WorkerId
from isthmus_shared.messages import subjects
from isthmus_shared.messages.base import WireMessage
from isthmus_shared.messages.health import IngressHeartbeat, ProcessState, Role, WorkerLost
from isthmus_shared.messages.work import SubmitDecode, SubmitPrefill, WorkerRef
from isthmus_shared.service import ServiceRuntime
from isthmus_shared.tracing import NullTracing, Tracing
from isthmus_sim.bus import SimBus, Weather
from isthmus_sim.fabric import Fabric
from isthmus_sim.relay import SimLink, SimRelay
from isthmus_sim.trace import Trace
from isthmus_worker.config import WorkerConfig
from isthmus_worker.host import WorkerHost
from isthmus_worker.roles import RoleHandlers, Served, Serving
from isthmus_worker.sessions import Sessions

MODEL = "isthmus-demo"
EOS_CHANCE = 0.01
REQUEST_TIMEOUT_S = 20.0
SLOT_BYTES = 32 * 1024
STAGING_WAIT_S = 1.0


class World:
    """What all processes of one simulation share."""

    def __init__(self, seed: int, trace: Trace) -> None:
        self.rng = random.Random(f"{seed}:world")
        self.trace = trace
        self.broker = MemoryBroker()
        self.weather = Weather(random.Random(f"{seed}:weather"))
        self.fabric = Fabric(random.Random(f"{seed}:fabric"))
        self.tracing: Tracing = NullTracing()
        """Of every process."""
        self.problems: list[str] = []
        """What broke a rule; empty at the end, or the run has failed."""
        self.asked: dict[RequestId, int] = {}
        self.transfers: dict[TransferId, int] = {}
        """The ids that an ingress drew, and the seed of the request they stand for (each client's is its own)."""


class Process:
    """One life of one process. `kill` makes it vanish; `ended` is set once nothing of it runs."""

    def __init__(self, world: World, name: str, main: Callable[[SimBus], Awaitable[None]]) -> None:
        self.name, self.killed = name, False
        self.bus = SimBus(world.broker.client(name), name, world.weather, world.trace)
        self._world, self._main = world, main
        self.task = asyncio.create_task(self._run(), name=name)
        self.task.add_done_callback(self._done)

    async def kill(self) -> None:
        self.killed = True
        self._world.trace.note(self.name, "killed")
        await self.bus.close()  # first: nothing that its end may still say is heard
        self.task.cancel()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            pump = tasks.create_task(self.bus.pump())
            await self._main(self.bus)
            pump.cancel()
        await self.bus.close()

    def _done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not (self.killed and _only(error, BusDisconnected)):
            self._world.problems.append(f"process {self.name} failed: {_said(error)}")


def _only(error: BaseException, kind: type[Exception]) -> bool:
    return (isinstance(error, BaseExceptionGroup) and error.split(kind)[1] is None) or isinstance(error, kind)


def _said(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_said(each) for each in error.exceptions)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return f"{error!r}{where}"


class Node:
    """A node's relay, over its lives. Publishes WorkerLost for those crashes that it sees."""

    def __init__(self, world: World, name: str, *, slots: int) -> None:
        self.node_id, self.lives = NodeId(name), 0
        self.relay: SimRelay | None = None
        self._world, self._slots = world, slots
        self.bus = world.broker.client(f"relay-{name}")
        self.start()

    def start(self) -> None:
        self.lives += 1
        self._world.trace.note(self.node_id, "relay started", life=self.lives)
        self.relay = SimRelay(
            self._world.fabric, self._world.trace, self.node_id, self.lives, slots=self._slots, slot_bytes=SLOT_BYTES
        )

    def lose(self) -> None:
        if self.relay is not None:
            self._world.trace.note(self.node_id, "relay lost")
            self.relay.die()
            self.relay = None

    async def connect(self, worker: WorkerRef) -> SimLink:
        if self.relay is None:
            raise PartyLost(f"no relay answers on {self.node_id}")
        return self.relay.connect(worker)

    async def tell_lost(self, worker: WorkerRef) -> None:
        if self.bus.connected:
            lost = WorkerLost(worker=worker, why="its connection closed")
            await self.bus.publish(subjects.WORKER_LOST, lost.encode())


class SlowableRunner:
    """A sim runner whose steps take `slowness` times as long."""

    def __init__(self, inner: SimRunner) -> None:
        self.slowness = 1.0
        self._inner = inner

    async def start(self) -> RunnerInfo:
        return await self._inner.start()

    async def stop(self) -> None:
        await self._inner.stop()

    async def execute(self, batch: Batch) -> StepResult:
        step = await self._inner.execute(batch)
        took_s = step.took_s * self.slowness  # it may change while we sleep
        await asyncio.sleep(took_s - step.took_s)
        return dataclasses.replace(step, took_s=took_s)


class FencedRole:
    """A role under watch: no attempt may take the place of a newer one at the same request."""

    def __init__(self, inner: RoleHandlers, world: World) -> None:
        self._inner, self._world = inner, world

    @property
    def role(self) -> Role:
        return self._inner.role

    def served(self, sessions: Sessions) -> tuple[Served, ...]:
        return tuple(self._watched(each, sessions) for each in self._inner.served(sessions))

    def _watched(self, each: Served, sessions: Sessions) -> Served:
        async def handle(message: WireMessage) -> WireMessage:
            held = 0
            if isinstance(message, SubmitPrefill | SubmitDecode):
                all_held = (r for r in sessions.requests.everything() if r.request_id == message.request_id)
                held = max((r.generation for r in all_held), default=0)
                self._world.asked[message.request_id] = message.sampling.seed
                if isinstance(message, SubmitPrefill):
                    self._world.transfers[message.transfer_id] = message.sampling.seed
            answer = await each.handler(message)
            sessions.requests.check_invariants()
            if held and isinstance(message, SubmitPrefill | SubmitDecode) and message.generation <= held:
                self._world.problems.append(
                    f"{sessions.worker.worker_id} took generation {message.generation} of {message.request_id} "
                    f"while it held {held}"
                )
            return answer

        return Serving(each.subject, each.request_type, handle, each.on_error)


class Service(abc.ABC):
    """Something that is started, crashes and is started again, under one name."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self.lives = name, 0
        self.process: Process | None = None
        self.runtime: ServiceRuntime[ServiceConfig] | None = None
        self._world = world

    def start(self) -> None:
        self.lives += 1
        self.process = Process(self._world, f"{self.name}.{self.lives}", self._main)

    @property
    def life(self) -> Incarnation:
        return Incarnation(f"{self.name}-life{self.lives}")

    async def crash(self) -> None:
        """Everything of it vanishes at once."""
        process, self.process, self.runtime = self.process, None, None
        assert process is not None, "only what runs can crash"
        await process.kill()

    async def drain(self) -> None:
        """Told to stop, as by SIGTERM; returns when it has."""
        process, runtime = self.process, self.runtime
        assert process is not None, "only what runs can stop"
        assert runtime is not None, "only what has started can stop in order"
        runtime.set_state(ProcessState.DRAINING)
        runtime.stopping.set()
        await asyncio.wait({process.task})

    @abc.abstractmethod
    async def _main(self, bus: SimBus) -> None: ...


class Worker(Service):
    def __init__(self, world: World, name: str, role: Role, node: Node, *, kv_layout: str, kv_blocks: int) -> None:
        super().__init__(world, name)
        self.node = node
        self.host: WorkerHost | None = None
        self.engine: BatchingEngine | None = None
        self.runner: SlowableRunner | None = None
        self._role = role
        self._link: SimLink | None = None
        self._config = WorkerConfig(
            id=WorkerId(name),
            node_id=node.node_id,
            kind=EngineKind.SIM,
            model_name=MODEL,
            kv_layout=kv_layout,
            kv_blocks=kv_blocks,
            sim_eos_chance=EOS_CHANCE,
            staging_wait_s=STAGING_WAIT_S,
        )

    async def crash(self, *, told: bool = False) -> None:
        """If `told`, its relay sees its connection close, and says so."""
        host, link = self.host, self._link
        self.host = self.engine = self.runner = self._link = None
        await super().crash()
        if link is not None:
            link.crash()
        if told and host is not None:
            await self.node.tell_lost(host.worker)

    async def _main(self, bus: SimBus) -> None:
        config, life = self._config, self.life
        name = f"{self._role.value}-worker"
        runtime = ServiceRuntime(
            name, config, bus=bus, instance=self.name, incarnation=life, serve_http=False, tracing=self._world.tracing
        )
        async with runtime:
            engine_config = config.engine_config()
            runner = SlowableRunner(SimRunner(engine_config))
            engine = BatchingEngine(runner, engine_config)
            role = PrefillRole(config.staging_wait_s) if self._role is Role.PREFILL else DecodeRole()
            me = WorkerRef(worker_id=config.id, incarnation=life, node_id=config.node_id)

            async def connect() -> SimLink:
                link = await self.node.connect(me)
                if self.process is None or self.life != life:
                    link.crash()  # this life ended while it was connecting
                else:
                    self._link = link
                return link

            host = WorkerHost(runtime, engine, connect, [FencedRole(role, self._world)])
            self.host, self.engine, self.runner, self.runtime = host, engine, runner, runtime
            await host.run()


class Planner(Service):
    async def _main(self, bus: SimBus) -> None:
        config = PlannerConfig(ttft_floor_s=3.0, transfer_floor_s=1.0, stall_floor_s=1.5)
        runtime = ServiceRuntime(
            "planner",
            config,
            bus=bus,
            instance=self.name,
            incarnation=self.life,
            serve_http=False,
            tracing=self._world.tracing,
        )
        async with runtime:
            self.runtime = runtime
            await PlannerService(runtime).run()


class SimIngress(Service):
    """The ingress below its front doors: hub, frontend and heartbeat."""

    def __init__(self, world: World, name: str, executor: ThreadPoolExecutor) -> None:
        super().__init__(world, name)
        self.frontend: Frontend | None = None
        self.hub: Hub | None = None
        self._executor = executor

    async def crash(self) -> None:
        self.frontend = self.hub = None
        await super().crash()

    async def _main(self, bus: SimBus) -> None:
        life = self.life
        config = IngressConfig.model_validate(
            {"id": self.name, "model": "unused", "request_timeout_s": REQUEST_TIMEOUT_S, "max_in_flight": 256}
        )
        runtime = ServiceRuntime(
            "ingress",
            config,
            bus=bus,
            instance=self.name,
            incarnation=life,
            serve_http=False,
            tracing=self._world.tracing,
        )
        subject = subjects.ingress_events(IngressId(self.name), life)
        hub = Hub(bus, subject, Roster(model_name=MODEL), runtime.metrics, runtime.log)

        def beat() -> IngressHeartbeat:
            return IngressHeartbeat(
                incarnation=life,
                state=runtime.state,
                interval_s=config.heartbeat_interval_s,
                ingress_id=IngressId(self.name),
                events_subject=subject,
                requests_in_flight=hub.running,
            )

        async with runtime, asyncio.TaskGroup() as service:
            background = [service.create_task(hub.run())]
            await hub.ready.wait()
            async with asyncio.TaskGroup() as work:
                cancels = Cancels(bus, runtime.log)
                deps = Deps(
                    bus,
                    subject,
                    work,
                    cancels,
                    runtime.metrics,
                    runtime.log,
                    runtime.tracing,
                    releases=Releases(bus),
                    last_plan=hub.last_plan,
                )
                limits = Limits(
                    config.request_timeout_s, config.attempts, config.route_patience_s, config.max_in_flight
                )
                text = Preparer(ModelText(byte_tokenizer(), None), self._executor)
                self.frontend = Frontend(text, hub, deps, limits, lambda: True)
                self.hub, self.runtime = hub, runtime
                background.append(service.create_task(runtime.heartbeat(subjects.HEARTBEAT_INGRESS, beat)))
                runtime.set_state(ProcessState.READY)
                await runtime.stopping.wait()
                await self.frontend.idle.wait()
                cancels.close()
            for task in background:
                task.cancel()


def byte_tokenizer() -> Tokenizer:
    """One token per byte; what the sim engine gives is printable."""
    inner = tokenizers.Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner, source="simulation")
