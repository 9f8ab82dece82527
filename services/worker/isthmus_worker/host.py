"""The worker as a service: one engine, its node's relay, and the roles attached to them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from isthmus_shared.engines.config import EngineKind
from isthmus_shared.engines.port import Engine, EngineInfo
from isthmus_shared.errors import BusDisconnected, Draining, EngineFailed, Fault, IsthmusError, PayloadTooLarge
from isthmus_shared.kv.negotiate import kv_form
from isthmus_shared.messages import subjects
from isthmus_shared.messages.assign import AssignRoles
from isthmus_shared.messages.health import (
    LEFT,
    IngressHeartbeat,
    ProcessState,
    Role,
    WorkerHeartbeat,
    WorkerLoad,
    WorkerLost,
)
from isthmus_shared.messages.prefix import PrefixSnapshotRequest
from isthmus_shared.messages.work import Cancel, MoveRequests, Release, SequenceEvent, StepFacts, WorkerRef
from isthmus_shared.runtime import ServiceRuntime
from isthmus_worker.assignment import Assignments, Wanted
from isthmus_worker.attachment import Attachment
from isthmus_worker.config import WorkerConfig
from isthmus_worker.outbox import Addressed, by_subject, encoded
from isthmus_worker.pace import Pace
from isthmus_worker.ports import RelayConnect
from isthmus_worker.prefix_teller import PrefixTeller
from isthmus_worker.role_desk import RoleDesk
from isthmus_worker.roles import RoleHandlers, refuse_ack
from isthmus_worker.sender import EventSender
from isthmus_worker.sessions import Sessions
from isthmus_worker.step_log import StepCounter, StepLog
from isthmus_worker.watch import SWEEP_S, enforce_deadlines, ingress_beat, sweep_ingresses

STOPPED = Fault(
    code=Draining.code, what="the worker stopped", why="its drain bound passed", todo="plan the request anew"
)
ENGINE_FAILED = Fault(code=EngineFailed.code, what="the engine failed", todo="plan the request anew")

OTHER_MODEL = Fault(
    code=Draining.code,
    what="the worker loads another model",
    why="its drain bound passed",
    todo="plan the request anew",
)

FLUSH_S = 2.0
"""For the last events to leave; they take milliseconds."""

MakeEngine = Callable[[str], Engine]
"""One that is not started, for that of the worker's models. Raises `ConfigInvalid`."""


class WorkerHost:
    def __init__(
        self,
        runtime: ServiceRuntime[WorkerConfig],
        engine: Engine,
        connect: RelayConnect | None,
        roles: Sequence[RoleHandlers],
        *,
        able: Sequence[RoleHandlers] = (),
        make_engine: MakeEngine | None = None,
    ) -> None:
        """`roles` from the start; `able`: others that may be assigned. `make_engine`: for the models that may be."""
        config = runtime.config
        self._runtime, self._engine, self._make_engine = runtime, engine, make_engine
        self._model = config.model_name
        self._info: EngineInfo | None = None
        self._form = ""
        self._replaced = asyncio.Event()
        """Cleared while one engine makes room for another."""
        self._replaced.set()
        self._attachment = Attachment(connect, runtime.log)
        self._step_log = StepLog()
        self._step: StepFacts | None = None
        """Behind the events that are about to be published."""
        self._pace = Pace(engine, self._attachment, itl_target_s=config.itl_target_s)
        self._sender = EventSender(runtime.bus, runtime.log)
        self.worker = WorkerRef(worker_id=config.id, incarnation=runtime.incarnation, node_id=config.node_id)
        self._prefixes = PrefixTeller(self.worker, runtime.bus)
        self.sessions = Sessions(
            worker=self.worker,
            engine=engine,
            attachment=self._attachment,
            publish=self._publish,
            metrics=runtime.metrics,
            log=runtime.log,
            tracing=runtime.tracing,
        )
        self.desk = RoleDesk(runtime, self.sessions, roles, able)
        self._assignments = Assignments(
            self.sessions,
            roles=lambda: self.desk.able,
            model=lambda: self._model,
            models=(config.model_name,) if make_engine is None else config.model_names,
            carry_out=self._become,
        )

    async def run(self) -> None:
        """Until the process is told to stop and has drained. Raises what the engine or a loop failed with."""
        why = "failed"
        try:
            async with asyncio.TaskGroup() as tasks:
                self.desk.open(tasks)
                loops = [tasks.create_task(loop) for loop in self._loops()]
                if await self._start(tasks):
                    loops.append(tasks.create_task(self._pump()))
                    loops.append(tasks.create_task(self._assignments.run()))
                    await self._runtime.stopping.wait()
                    await self._drain()
                why = LEFT
                self.desk.detach_all()
                for loop in loops:
                    loop.cancel()
        finally:
            with contextlib.suppress(BusDisconnected, PayloadTooLarge):
                lost = WorkerLost(worker=self.worker, why=why)
                await self._runtime.bus.publish(subjects.WORKER_LOST, lost.encode())
            await self._engine.stop()  # before the relay, so that what is cut short is given back in order
            await self._attachment.close()

    # ---------------------------------------------------------------- life

    def _loops(self) -> list[Coroutine[Any, Any, None]]:
        rt = self._runtime

        async def on_ingress(beat: IngressHeartbeat) -> None:
            await ingress_beat(self.sessions, beat)

        return [
            rt.heartbeat(subjects.HEARTBEAT_WORKER, self.beat),
            rt.serve(subjects.worker_cancel(self.worker.worker_id), Cancel, self.sessions.cancel, on_error=refuse_ack),
            rt.serve(
                subjects.worker_assign(self.worker.worker_id),
                AssignRoles,
                self._assignments.assign,
                on_error=refuse_ack,
            ),
            rt.serve(
                subjects.worker_prefixes(self.worker.worker_id),
                PrefixSnapshotRequest,
                self._prefixes.snapshot,
                on_error=self._prefixes.refuse,
            ),
            rt.watch(subjects.HEARTBEAT_INGRESS, IngressHeartbeat, on_ingress),
            rt.watch(subjects.worker_release(self.worker.worker_id), Release, self.sessions.release),
            self._sender.run(),
            self._prefixes.run(),
            self._attachment.run(self._beat_now, self.sessions.relay_lost),
            enforce_deadlines(self.sessions),
            self._sweep(),
        ]

    async def _start(self, tasks: asyncio.TaskGroup) -> bool:
        """Warm engine, roles attached, relay attached if there is to be one; False if told to stop before."""
        starting = tasks.create_task(self._become_ready())
        stopping = tasks.create_task(_wait(self._runtime.stopping))
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            return False
        return True

    async def _become_ready(self) -> None:
        await self._start_engine()
        await self.desk.attach_own()
        if self._attachment.configured:
            await self._attachment.attached.wait()
        self._runtime.set_state(ProcessState.READY)

    async def _start_engine(self) -> None:
        info = await self._engine.start()
        self._info, self._form = info, kv_form(self._engine.manifest(1))
        self._prefixes.follow(self._engine.prefixes)
        self._runtime.log.info("engine.started", model=info.model, layout=info.kv_layout, blocks=info.kv_blocks_total)

    async def _become(self, wanted: Wanted) -> None:
        """What the leader asked for."""
        if wanted.model != self._model:
            await self._change_model(wanted.model, move=wanted.move)
        ending = await self.desk.become(wanted.roles)
        await self._beat_now()
        if wanted.move and Role.DECODE in ending:
            await self._move_away("the worker gives up the role decode")

    async def _change_model(self, model: str, *, move: bool) -> None:
        """Drains, and serves the other model from then on; or the present one again, if that cannot be loaded."""
        log, before = self._runtime.log, self._model
        log.info("model.changing", model=model, before=before)
        self._runtime.set_state(ProcessState.DRAINING)
        if move:
            await self._move_away("the worker loads another model")
        await asyncio.sleep(self._runtime.config.linger_s)  # what was routed before everyone knew
        self.sessions.draining = True
        await self._finish_within(self._runtime.config.drain_s, OTHER_MODEL)
        self._runtime.set_state(ProcessState.STARTING)
        self._replaced.clear()
        await self._engine.stop()
        self._prefixes.follow(None)
        try:
            await self._replace_engine(model)
        except IsthmusError as error:
            log.error("model.refused", model=model, code=error.code, why=error.text)
            await self._replace_engine(before)
        self._replaced.set()
        if not self._runtime.stopping.is_set():
            self.sessions.draining = False
            self._runtime.set_state(ProcessState.READY)
        log.info("model.changed", model=self._model)

    async def _replace_engine(self, model: str) -> None:
        """Raises `ConfigInvalid` or what the engine cannot be started with."""
        assert self._make_engine is not None, "only a model that can be loaded is ever wanted"
        self._info, self._model = None, model
        engine = self._make_engine(model)
        self._engine = self.sessions.engine = engine
        self._pace = Pace(engine, self._attachment, itl_target_s=self._runtime.config.itl_target_s)
        self._step_log.forget()
        await self._start_engine()

    async def _move_away(self, why: str) -> None:
        with contextlib.suppress(BusDisconnected, PayloadTooLarge):  # then they finish here
            message = MoveRequests(worker=self.worker, why=why)
            await self._runtime.bus.publish(subjects.MOVE_REQUESTS, message.encode())

    async def _pump(self) -> None:
        """The engine's reports to their ingresses, in order; and after it has been replaced, the next one's."""
        while True:
            await self._replaced.wait()
            await self._pump_engine(self._engine)
            if self._replaced.is_set():
                break
        await self.sessions.fail(self.sessions.requests.everything(), ENGINE_FAILED)
        await self._flush()
        raise EngineFailed("the engine has stopped stepping", why="see its log", todo="restart the worker")

    async def _pump_engine(self, engine: Engine) -> None:
        metrics = self._runtime.metrics
        loop = asyncio.get_running_loop()
        counter = StepCounter(started_s=loop.time())
        async for report in engine.steps():
            phase = "decode" if report.decode_sequences else "prefill"
            metrics.engine_steps.labels(phase).inc()
            metrics.engine_step_seconds.labels(phase).observe(report.step_s)
            metrics.engine_tokens.labels("prefill").inc(report.prefill_tokens)
            metrics.engine_tokens.labels("decode").inc(report.decode_sequences)
            self._step = counter.facts(report, now_s=loop.time())
            await self.sessions.take_report(report)
            self._step = None
            self._prefixes.notice()
            if self._info is not None:
                self._pace.step(report, self._info, now_s=loop.time())
                held = self._info.kv_blocks_total - self._engine.load().kv_blocks_free
                self._step_log.note(report, held * self._info.kv_block_tokens)

    async def _drain(self) -> None:
        """Refuses new work and lets what runs finish, up to the bound."""
        self.sessions.draining = True
        self._runtime.set_state(ProcessState.DRAINING)
        self._runtime.log.info("worker.draining", unfinished=self.sessions.requests.unfinished)
        await self._finish_within(self._runtime.config.drain_s, STOPPED)

    async def _finish_within(self, bound_s: float, fault: Fault) -> None:
        """Until the engine works for nobody. What is not done after half of the time is to move elsewhere; what is
        still here at the end of it ends with that fault. (What is staged is the relay's, and stays.)"""
        requests = self.sessions.requests
        until_s = asyncio.get_running_loop().time() + bound_s
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(bound_s / 2):
                    await self.sessions.idle.wait()
            if requests.has_unfinished(prefill=False):
                await self._move_away(fault.what)
            async with asyncio.timeout_at(until_s):
                await self.sessions.idle.wait()
        except TimeoutError:
            await self.sessions.fail(requests.running(), fault)
            with contextlib.suppress(TimeoutError):  # the engine lets go at its next step boundary
                async with asyncio.timeout(FLUSH_S):
                    await self.sessions.idle.wait()
        await self._flush()

    async def _flush(self) -> None:
        with contextlib.suppress(TimeoutError):  # a bus that is away does not hold the process up
            async with asyncio.timeout(FLUSH_S):
                await self._sender.flushed()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await sweep_ingresses(self.sessions, deaf=not self._runtime.bus.connected)

    # ----------------------------------------------------------------- out

    async def _publish(self, events: list[Addressed]) -> None:
        """One message per ingress and step."""
        max_bytes = self._runtime.bus.max_payload_bytes
        for subject, of_subject in by_subject(events).items():
            for data in encoded(self.worker, of_subject, max_bytes, self._oversized, self._step):
                self._sender.put(subject, data)

    def _oversized(self, event: SequenceEvent) -> None:
        """Left out: the ingress sees the gap. One token's logprobs are far below any bus' limit."""
        self._runtime.log.error("events.too_large", request=event.request_id)

    async def _beat_now(self) -> None:
        """The relay came or went: the planner should know before the next beat."""
        with contextlib.suppress(BusDisconnected, PayloadTooLarge):
            await self._runtime.bus.publish(subjects.HEARTBEAT_WORKER, self.beat().encode())

    def beat(self) -> WorkerHeartbeat:
        rt, info = self._runtime, self._info
        return WorkerHeartbeat(
            incarnation=rt.incarnation,
            state=rt.state,
            interval_s=rt.config.heartbeat_interval_s,
            http_address=rt.http_address,
            worker_id=self.worker.worker_id,
            node_id=self.worker.node_id,
            roles=self.desk.shown,
            roles_able=self.desk.able,
            vendor=rt.config.vendor,
            engine=rt.config.kind.value,
            model=self._model,
            models_able=self._assignments.models,
            epoch=self._assignments.epoch,
            max_batch=0 if rt.config.kind is EngineKind.VLLM else rt.config.max_batch,
            prefix_sequence=self._prefixes.sequence,
            model_fingerprint="" if info is None else info.model_fingerprint,
            kv_form=self._form,
            kv_layout=rt.config.kv_layout if info is None else info.kv_layout,
            max_model_len_tokens=0 if info is None else info.max_model_len_tokens,
            kv_block_tokens=1 if info is None else info.kv_block_tokens,
            relay=self._attachment.relay,
            load=WorkerLoad() if info is None else self._load(info),
        )

    def _load(self, info: EngineInfo) -> WorkerLoad:
        self._pace.room(info)
        load, metrics = self._engine.load(), self._runtime.metrics
        metrics.engine_kv_blocks.set(info.kv_blocks_total)
        metrics.kv_cache_usage_perc.set(1 - load.kv_blocks_free / max(1, info.kv_blocks_total))
        metrics.num_requests_running.set(load.running)
        metrics.num_requests_waiting.set(load.waiting + load.loading)
        metrics.num_requests_waiting_by_reason.labels("capacity").set(load.waiting)
        metrics.num_requests_waiting_by_reason.labels("deferred").set(load.loading)
        return WorkerLoad(
            running=load.running,
            waiting=load.waiting,
            loading=load.loading,
            queued_prefill_tokens=load.queued_prefill_tokens,
            kv_blocks_total=info.kv_blocks_total,
            kv_blocks_free=load.kv_blocks_free,
            decode_step_s=load.decode_step_s,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            steps_total=self._step_log.total,
            steps=self._step_log.samples,
        )


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
