"""A planner and workers that speak the real messages over any bus and compute nothing: tokens come from a script.

What they hold is kept by name, so that a test can say that nothing was left; faults are switched on by field.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from isthmus_shared.bus.port import Bus, BusMessage
from isthmus_shared.errors import BusDisconnected, Fault, IsthmusError, NoCapacity, StaleParty
from isthmus_shared.ids import Generation, Incarnation, NodeId, RequestId, WorkerId, new_incarnation
from isthmus_shared.kv.manifest import GroupKind, KvDtype, KvGroup, KvManifest
from isthmus_shared.messages import subjects
from isthmus_shared.messages.base import WireMessage
from isthmus_shared.messages.health import ProcessState, Role, WorkerHeartbeat, WorkerLoad, WorkerLost
from isthmus_shared.messages.route import Deadlines, Mode, Prediction, Queued, Route, RouteReply, RouteRequest
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
    TokenLogprob,
    WorkerRef,
)

Script = Callable[[tuple[int, ...], int], int]
"""(prompt, output index) → token id."""
Held = tuple[RequestId, Generation]
Submit = SubmitPrefill | SubmitDecode
EOS_TOKEN_ID = 257
"""Of the byte-level test tokenizer."""
MODEL = "tiny"


def say(text: str, *, eos: int | None = EOS_TOKEN_ID) -> Script:
    """The bytes of a text, then the end-of-sequence token (None: the text again and again)."""
    data = text.encode()

    def script(_prompt: tuple[int, ...], index: int) -> int:
        if index < len(data) or eos is None:
            return data[index % len(data)]
        return eos

    return script


@dataclass(slots=True)
class Faults:
    """What a worker does wrong. Counts are in tokens that it has sent for a request."""

    refuse: IsthmusError | None = None
    ignore_submits: bool = False
    stall_after: int | None = None
    fail_after: int | None = None
    die_after: int | None = None
    lose_token: int | None = None
    """Output index that is never sent."""
    duplicate: bool = False
    """Every event comes twice."""
    answer_late: asyncio.Event | None = None
    """Submits are answered only after it is set; tokens don't wait for it."""


class FakeWorker:
    def __init__(self, cluster: FakeCluster, name: str, roles: tuple[Role, ...]) -> None:
        self.cluster, self.name, self.roles = cluster, name, roles
        self.incarnation = new_incarnation()
        self.faults = Faults()
        self.held: set[Held] = set()
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.alive = True
        self.said = 0
        """Events, heard or not."""
        self._runs: dict[Held, asyncio.Task[None]] = {}
        self._started: dict[Held, asyncio.Future[int]] = {}
        self._bus = cluster.bus
        self._serving: asyncio.Task[None] | None = None

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(
            worker_id=WorkerId(self.name), incarnation=self.incarnation, node_id=NodeId(f"node-{self.name}")
        )

    async def run(self, listening: asyncio.Event) -> None:
        name = WorkerId(self.name)
        async with asyncio.TaskGroup() as tasks:
            self._serving = asyncio.current_task()
            self._tasks = tasks
            heard = [asyncio.Event() for _ in range(4)]
            serve = self.cluster.serve
            tasks.create_task(serve(subjects.worker_prefill(name), SubmitPrefill, self._submit, heard[0]))
            tasks.create_task(serve(subjects.worker_decode(name), SubmitDecode, self._submit, heard[1]))
            tasks.create_task(serve(subjects.worker_start(name), StartDecode, self._start, heard[2]))
            tasks.create_task(serve(subjects.worker_cancel(name), Cancel, self._cancel, heard[3]))
            for event in heard:
                await event.wait()
            tasks.create_task(self._beat())
            listening.set()

    async def die(self, *, tell: bool = True) -> None:
        """End at once, as by SIGKILL; `tell`: its relay notices."""
        self.alive = False
        self.held.clear()
        for future in self._started.values():
            future.cancel()
        if tell:
            await self._bus.publish(subjects.WORKER_LOST, WorkerLost(worker=self.ref, why="killed").encode())
        if self._serving is not None:
            self._serving.cancel()

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(BusDisconnected):  # nobody hears it, as in life
                await self._bus.publish(subjects.HEARTBEAT_WORKER, self.heartbeat().encode())
            await asyncio.sleep(self.cluster.beat_s)

    def heartbeat(self) -> WorkerHeartbeat:
        return WorkerHeartbeat(
            incarnation=self.incarnation,
            state=ProcessState.READY,
            interval_s=self.cluster.beat_s,
            worker_id=WorkerId(self.name),
            node_id=NodeId(f"node-{self.name}"),
            roles=self.roles,
            vendor="cpu",
            engine="fake",
            model=self.cluster.model,
            model_fingerprint="fake",
            kv_form="fp32",
            kv_layout="none",
            max_model_len_tokens=self.cluster.max_model_len_tokens,
            kv_block_tokens=16,
            load=WorkerLoad(),
        )

    async def _submit(self, work: Submit) -> SubmitReply | None:
        self.submits.append(work)
        if self.faults.ignore_submits:
            return None
        if work.incarnation != self.incarnation:
            return SubmitReply(fault=StaleParty("another life").to_fault())
        if self.faults.refuse is not None:
            return SubmitReply(fault=self.faults.refuse.to_fault())
        key = (work.request_id, work.generation)
        self.held.add(key)
        crossing = isinstance(work, SubmitDecode) and work.ticket is not None
        if crossing:
            self._started[key] = asyncio.get_running_loop().create_future()
        self._runs[key] = self._tasks.create_task(self._generate(work))
        if self.faults.answer_late is not None:
            await self.faults.answer_late.wait()
        if isinstance(work, SubmitDecode):
            return SubmitReply()
        return SubmitReply(ticket=_ticket(work))

    async def _start(self, start: StartDecode) -> Ack:
        future = self._started.get((start.request_id, start.generation))
        if future is not None and not future.done():
            future.set_result(start.first_token_id)
        return Ack()

    async def _cancel(self, cancel: Cancel) -> Ack:
        self.cancels.append(cancel)
        key = (cancel.request_id, cancel.generation)
        self.held.discard(key)
        run = self._runs.pop(key, None)
        if run is not None:
            run.cancel()
        self.cluster.changed.set()
        return Ack()

    async def _generate(self, work: Submit) -> None:
        key = (work.request_id, work.generation)
        prompt = work.token_ids[: len(work.token_ids) - work.output_offset]
        index = work.output_offset
        if key in self._started:
            first = await self._started[key]
            assert first == self.cluster.script(prompt, index), "the first token is not the one that was sampled"
            self.cluster.consumed(key)
            index += 1
        await self.cluster.gate.wait()
        sent = 0
        while await self._step(work, prompt, index, sent):
            index, sent = index + 1, sent + 1
            await asyncio.sleep(self.cluster.step_s)

    async def _step(self, work: Submit, prompt: tuple[int, ...], index: int, sent: int) -> bool:
        """One token and what follows from it; False when the sequence is over here."""
        faults = self.faults
        if faults.stall_after is not None and sent >= faults.stall_after:
            await asyncio.Event().wait()
        if faults.die_after is not None and sent >= faults.die_after:
            await self.die()
            return False
        if faults.fail_after is not None and sent >= faults.fail_after:
            fault = Fault(code="engine_failed", what="the engine raised")
            self.held.discard((work.request_id, work.generation))
            await self._say(work, index, (), FinishReason.ERROR, fault)
            return False
        token = self.cluster.script(prompt, index)
        finish: FinishReason | None = None
        if (token == EOS_TOKEN_ID and not work.sampling.ignore_eos) or token in work.sampling.stop_token_ids:
            finish = FinishReason.STOP
        elif index + 1 >= work.sampling.max_tokens:
            finish = FinishReason.LENGTH
        elif isinstance(work, SubmitPrefill):
            finish = FinishReason.HANDOFF
        if finish in (FinishReason.STOP, FinishReason.LENGTH):
            self.held.discard((work.request_id, work.generation))
        if faults.lose_token != index:
            await self._say(work, index, (token,), finish, None)
        return finish is None

    async def _say(
        self, work: Submit, index: int, tokens: tuple[int, ...], finish: FinishReason | None, fault: Fault | None
    ) -> None:
        event = SequenceEvent(
            request_id=work.request_id,
            generation=work.generation,
            output_index=index,
            token_ids=tokens,
            logprobs=_logprobs(tokens, work.sampling),
            finish=finish,
            fault=fault,
            cached_tokens=self.cluster.cached_tokens,
        )
        data = StepEvents(worker=self.ref, events=(event,)).encode()
        self.said += 1
        for _ in range(2 if self.faults.duplicate else 1):
            with contextlib.suppress(BusDisconnected):
                await self._bus.publish(work.events_subject, data)


def _logprobs(tokens: tuple[int, ...], sampling: SamplingParams) -> tuple[TokenLogprob, ...] | None:
    if sampling.logprobs is None:
        return None
    told = []
    for token in tokens:
        top = ((token, -0.5), ((token + 1) % 256, -1.5), ((token + 2) % 256, float("-inf")))
        told.append(TokenLogprob(logprob=-0.5, top=top[: sampling.logprobs]))
    return tuple(told)


def _ticket(work: SubmitPrefill) -> KvTicket:
    tokens = len(work.token_ids)
    group = KvGroup(kind=GroupKind.FULL, layer_ids=(0,), kv_heads=1, head_dim=8, token_start=0, token_end=tokens)
    return KvTicket(
        transfer_id=work.transfer_id,
        generation=work.generation,
        source=RelayRef(node_id=NodeId("node"), incarnation=Incarnation("relay"), address="127.0.0.1:1"),
        manifest=KvManifest(model_fingerprint="fake", dtype=KvDtype.FP32, prompt_tokens=tokens, groups=(group,)),
    )


@dataclass(slots=True)
class FakeCluster:
    """Worker `p…` names take prefill, `d…` decode, `a…` are aggregated only. Use `running()`."""

    bus: Bus
    script: Script = field(default_factory=lambda: say("hello"))
    names: tuple[str, ...] = ("p1", "d1")
    model: str = MODEL
    max_model_len_tokens: int = 4096
    beat_s: float = 0.5
    step_s: float = 0.0
    cached_tokens: int = 0
    deadlines: Deadlines = field(default_factory=lambda: Deadlines(ttft_s=10, transfer_s=10, stall_s=10))
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    routes: list[RouteRequest] = field(default_factory=list)
    asks_in_line: int = 0
    """So many asks for a route are told that they are still in line."""
    planner_fault: IsthmusError | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: nobody generates."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at every Cancel."""
    planner: Incarnation = field(default_factory=new_incarnation)

    @asynccontextmanager
    async def running(self, *, planner: bool = True) -> AsyncIterator[FakeCluster]:
        self.gate.set()
        async with asyncio.TaskGroup() as tasks:
            running: list[asyncio.Task[None]] = []
            if planner:
                heard = asyncio.Event()
                serve = self.serve(subjects.ROUTE, RouteRequest, self._route, heard, queue=subjects.PLANNER_QUEUE)
                running.append(tasks.create_task(serve))
                await heard.wait()
            for name in self.names:
                running.append(await self.add_worker(tasks, name))
            try:
                yield self
            finally:
                for task in running:
                    task.cancel()

    async def add_worker(self, tasks: asyncio.TaskGroup, name: str) -> asyncio.Task[None]:
        roles = {"p": (Role.PREFILL,), "d": (Role.DECODE,)}.get(name[0], (Role.PREFILL, Role.DECODE))
        worker = self.workers[name] = FakeWorker(self, name, roles)
        listening = asyncio.Event()
        task = tasks.create_task(worker.run(listening))
        await listening.wait()
        return task

    @property
    def held(self) -> dict[str, set[Held]]:
        """What every worker still holds; empty when all is free."""
        return {name: worker.held for name, worker in self.workers.items() if worker.held}

    async def beat(self) -> None:
        """A heartbeat of every worker, now."""
        for worker in self.workers.values():
            await self.bus.publish(subjects.HEARTBEAT_WORKER, worker.heartbeat().encode())

    def consumed(self, key: Held) -> None:
        for worker in self.workers.values():
            if Role.DECODE not in worker.roles:
                worker.held.discard(key)

    async def _route(self, request: RouteRequest) -> RouteReply:
        self.routes.append(request)
        if self.planner_fault is not None:
            return RouteReply(fault=self.planner_fault.to_fault())
        if self.asks_in_line > 0:
            self.asks_in_line -= 1
            await asyncio.sleep(min(0.1, request.patience_s))
            return RouteReply(queued=Queued(position=0, wait_s=0.1))
        usable = [w for w in self.workers.values() if w.alive and w.incarnation not in request.exclude]
        prefill = next((w for w in usable if w.name.startswith("p")), None)
        decode = next((w for w in usable if w.name.startswith("d")), None)
        both = next((w for w in usable if w.name.startswith("a")), None)
        predicted = Prediction(ttft_p50_s=0, ttft_p90_s=0, itl_p50_s=0, itl_p90_s=0, calibrated=False)
        if prefill is not None and decode is not None:
            mode, source, target = Mode.DISAGGREGATED, prefill.ref, decode.ref
        elif both is not None:
            mode, source, target = Mode.AGGREGATED, None, both.ref
        else:
            return RouteReply(fault=NoCapacity("no worker is left", retry_after_s=2).to_fault())
        route = Route(
            mode=mode,
            prefill=source,
            decode=target,
            deadlines=self.deadlines,
            predicted=predicted,
            planner=self.planner,
        )
        return RouteReply(route=route)

    async def serve(
        self,
        subject: str,
        kind: type[Any],
        handler: Callable[[Any], Awaitable[WireMessage | None]],
        listening: asyncio.Event,
        *,
        queue: str | None = None,
    ) -> None:
        """Answer every request in a task of its own; a handler that returns None leaves it unanswered."""

        async def answer(message: BusMessage) -> None:
            reply = await handler(kind.decode(message.data))
            if reply is not None and message.reply is not None:
                await self.bus.publish(message.reply, reply.encode())

        async with self.bus.subscribe(subject, queue=queue) as requests, asyncio.TaskGroup() as tasks:
            listening.set()
            async for message in requests:
                work: Coroutine[Any, Any, None] = answer(message)
                tasks.create_task(work)
