"""The services as processes of a simulated cluster, unmodified: what each is made of, and how it starts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models

from isthmus_decode.role import DecodeRole
from isthmus_ingress.config import IngressConfig
from isthmus_ingress.frontend import Frontend
from isthmus_ingress.hub import Hub
from isthmus_ingress.prepare import Preparer
from isthmus_ingress.service import Ingress
from isthmus_ingress.text import ModelText, Tokenizer, byte_level_alphabet
from isthmus_planner.config import PlannerConfig
from isthmus_planner.service import PlannerService
from isthmus_prefill.role import PrefillRole
from isthmus_shared.engines.batching import BatchingEngine
from isthmus_shared.engines.config import EngineConfig, EngineKind
from isthmus_shared.engines.runner_port import Runner, RunnerInfo, StepResult
from isthmus_shared.engines.sequence import Batch
from isthmus_shared.engines.sim import SimRunner, StepCosts
from isthmus_shared.errors import EngineFailed
from isthmus_shared.ids import WorkerId
from isthmus_shared.messages.base import WireMessage
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.work import SubmitDecode, SubmitPrefill, WorkerRef
from isthmus_shared.service import ServiceRuntime
from isthmus_sim.bus import SimBus
from isthmus_sim.loop import Life
from isthmus_sim.process import Service, World
from isthmus_sim.relay import Relay, SimLink
from isthmus_worker.config import WorkerConfig
from isthmus_worker.host import WorkerHost
from isthmus_worker.roles import RoleHandlers, Served, Serving
from isthmus_worker.sessions import Sessions

MODEL = "isthmus-demo"
EOS_CHANCE = 0.01
REQUEST_TIMEOUT_S = 20.0
STAGING_WAIT_S = 1.0

MakeRunner = Callable[[EngineConfig], Runner]


class SlowableRunner:
    """A runner whose steps take `slowness` times as long, and fail while `broken`."""

    def __init__(self, inner: Runner) -> None:
        self.slowness = 1.0
        self.broken = False
        self._inner = inner

    async def start(self) -> RunnerInfo:
        return await self._inner.start()

    async def stop(self) -> None:
        await self._inner.stop()

    async def execute(self, batch: Batch) -> StepResult:
        step = await self._inner.execute(batch)
        took_s = step.took_s * self.slowness  # it may change while we sleep
        await asyncio.sleep(took_s - step.took_s)
        if self.broken:
            raise EngineFailed("out of memory", why="as it was told to be")
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


class Worker(Service):
    """`able`: roles that may be assigned to it beside its own. `settings`: of its `WorkerConfig`, beside these.
    `engine`, `costs`, `make_runner`: in place of what those give."""

    def __init__(
        self,
        world: World,
        name: str,
        role: Role,
        node: Relay,
        *,
        kv_layout: str,
        kv_blocks: int,
        engine: EngineConfig | None = None,
        costs: StepCosts | None = None,
        make_runner: MakeRunner | None = None,
        able: tuple[Role, ...] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(world, name)
        self._engine_config = engine
        self._make_runner = make_runner or partial(SimRunner, costs=costs)
        self.node = node
        self.host: WorkerHost | None = None
        self.engine: BatchingEngine | None = None
        self.runner: SlowableRunner | None = None
        self._role = role
        self._link: SimLink | None = None
        self._able = able
        given: dict[str, Any] = {
            "id": WorkerId(name),
            "node_id": node.node_id,
            "kind": EngineKind.SIM,
            "model_name": MODEL,
            "kv_layout": kv_layout,
            "kv_blocks": kv_blocks,
            "sim_eos_chance": EOS_CHANCE,
            "staging_wait_s": STAGING_WAIT_S,
        }
        self._config = WorkerConfig(**(given | dict(settings or {})))

    async def crash(self) -> None:
        """Its relay sees its connection close, and says so."""
        link = self._link
        self.host = self.engine = self.runner = self._link = None
        await super().crash()
        if link is not None:
            link.crash()

    async def _main(self, bus: SimBus, life: Life) -> None:
        config, incarnation = self._config, self.life
        runtime = ServiceRuntime(
            f"{self._role.value}-worker",
            config,
            bus=bus,
            instance=self.name,
            incarnation=incarnation,
            serve_http=False,
            tracing=self.world.tracing,
        )
        async with runtime:
            engine_config = self._engine_config or config.engine_config()
            runner = SlowableRunner(self._make_runner(engine_config))
            engine = BatchingEngine(runner, engine_config)
            me = WorkerRef(worker_id=config.id, incarnation=incarnation, node_id=config.node_id)

            async def connect() -> SimLink:
                link = await SimLink.attach(self.node, life, me)
                if self.process is None or self.life != incarnation:
                    link.crash()  # this life ended while it was connecting
                else:
                    self._link = link
                return link

            own, able = self._handlers(self._role), [self._handlers(role) for role in self._able]
            host = WorkerHost(runtime, engine, connect, [own], able=able)
            self.host, self.engine, self.runner, self.runtime = host, engine, runner, runtime
            await host.run()

    def _handlers(self, role: Role) -> RoleHandlers:
        inner = PrefillRole(self._config.staging_wait_s) if role is Role.PREFILL else DecodeRole()
        return FencedRole(inner, self.world)


class Planner(Service):
    """`settings`: of its `PlannerConfig`, in place of tight deadlines that suit faults."""

    def __init__(self, world: World, name: str, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(world, name)
        tight = {"ttft_floor_s": 3.0, "transfer_floor_s": 1.0, "stall_floor_s": 1.5}
        self._config = PlannerConfig.model_validate(tight if settings is None else settings)
        self.service: PlannerService | None = None

    @property
    def leads(self) -> int | None:
        """The epoch with which it would act now, by its own clock; a paused one too."""
        if self.service is None or self.process is None or self.process.task.done():
            return None
        return self.process.life.context.run(lambda service: service.leadership.epoch, self.service)

    async def crash(self) -> None:
        self.service = None
        await super().crash()

    async def _main(self, bus: SimBus, life: Life) -> None:
        config = self._config
        runtime = ServiceRuntime(
            "planner",
            config,
            bus=bus,
            instance=self.name,
            incarnation=self.life,
            serve_http=False,
            tracing=self.world.tracing,
        )
        async with runtime:
            self.service, self.runtime = PlannerService(runtime), runtime
            await self.service.run()


class SimIngress(Service):
    """The ingress without its HTTP door; clients enter below it, where both doors meet."""

    def __init__(self, world: World, name: str, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(world, name)
        self._settings = {"request_timeout_s": REQUEST_TIMEOUT_S, "max_in_flight": 256, **(settings or {})}
        self.frontend: Frontend | None = None
        self.hub: Hub | None = None

    async def crash(self) -> None:
        self.frontend = self.hub = None
        await super().crash()

    async def _main(self, bus: SimBus, life: Life) -> None:
        config = IngressConfig.model_validate(
            {"id": self.name, "model": "unused", "model_name": MODEL, **self._settings}
        )
        runtime = ServiceRuntime(
            "ingress",
            config,
            bus=bus,
            instance=self.name,
            incarnation=self.life,
            serve_http=False,
            tracing=self.world.tracing,
        )
        async with runtime:
            await _Watched(self, runtime).run()


class _Watched(Ingress):
    """The ingress, which shows its inside to the simulation's clients."""

    def __init__(self, service: SimIngress, runtime: ServiceRuntime[IngressConfig]) -> None:
        super().__init__(runtime, serve_http=False, load_text=_text)
        self._service = service

    def _frontend(self, preparer: Preparer, work: asyncio.TaskGroup) -> Frontend:
        frontend = super()._frontend(preparer, work)
        self._service.frontend, self._service.hub = frontend, self.hub
        self._service.runtime = self.runtime
        return frontend


def _text(_model: Path) -> ModelText:
    return ModelText(byte_tokenizer(), None)


def byte_tokenizer() -> Tokenizer:
    """One token per byte; what the sim engine gives is printable."""
    inner = tokenizers.Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner, source="simulation")
