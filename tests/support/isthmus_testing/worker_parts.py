"""An engine and a relay link that do what a test tells them, and remember what they were told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from isthmus_shared.engines.kv_memory import MemoryKvTransfer
from isthmus_shared.engines.kv_port import KvSink, KvSource
from isthmus_shared.engines.port import EngineInfo, EngineLoad, EngineRequest, SequenceOutput, StepReport
from isthmus_shared.errors import Fault, IsthmusError
from isthmus_shared.ids import Generation, Incarnation, NodeId, RequestId, TransferId, WorkerId
from isthmus_shared.kv.manifest import GroupKind, KvDtype, KvGroup, KvManifest
from isthmus_shared.messages.work import FinishReason, KvTicket, RelayRef, WorkerRef
from isthmus_shared.metrics import Metrics
from isthmus_worker.attachment import Attachment
from isthmus_worker.outbox import Addressed
from isthmus_worker.sessions import Sessions

WORKER = WorkerRef(worker_id=WorkerId("w"), incarnation=Incarnation("life"), node_id=NodeId("n"))
RELAY = RelayRef(node_id=NodeId("n"), incarnation=Incarnation("relay-life"), address="127.0.0.1:1")


def manifest(tokens: int, dtype: KvDtype = KvDtype.FP32) -> KvManifest:
    group = KvGroup(kind=GroupKind.FULL, layer_ids=(0,), kv_heads=1, head_dim=4, token_start=0, token_end=tokens)
    return KvManifest(model_fingerprint="f", dtype=dtype, prompt_tokens=tokens, groups=(group,))


class ToldEngine:
    """Takes everything, computes nothing; outputs are what the test reports."""

    def __init__(self) -> None:
        self.held: dict[RequestId, EngineRequest] = {}
        self.started: list[tuple[RequestId, int]] = []
        self.aborted: list[RequestId] = []
        self.paused: list[RequestId] = []
        self.resumed: list[RequestId] = []
        self.saving: dict[RequestId, KvSink] = {}
        self.kv_tokens = 8
        self.refusal: IsthmusError | None = None
        self.save_refusal: IsthmusError | None = None

    async def start(self) -> EngineInfo:
        return EngineInfo("demo", "f", 100, "NHD", 10, 16)

    def manifest(self, prompt_tokens: int) -> KvManifest:
        return manifest(prompt_tokens)

    def submit(self, request: EngineRequest) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.held[request.request_id] = request

    def start_decode(self, request_id: RequestId, first_token_id: int) -> None:
        self.started.append((request_id, first_token_id))

    def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)

    async def pause(self, request_id: RequestId) -> int:
        if self.refusal is not None:
            raise self.refusal
        self.paused.append(request_id)
        return self.kv_tokens

    def save(self, request_id: RequestId, sink: KvSink) -> None:
        if self.save_refusal is not None:
            raise self.save_refusal
        self.saving[request_id] = sink

    def resume(self, request_id: RequestId) -> None:
        self.resumed.append(request_id)

    async def steps(self) -> AsyncIterator[StepReport]:
        for report in ():
            yield report

    @property
    def prefixes(self) -> None:
        return None

    def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 0, 10, None, None)

    async def stop(self) -> None:
        self.held.clear()


@dataclass
class ToldLink:
    """A relay link over plain memory. While `room` is cleared, `open_sink` waits."""

    relay: RelayRef = RELAY
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    room: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    transfers: dict[TransferId, MemoryKvTransfer] = field(default_factory=dict)
    aborted: list[tuple[TransferId, Generation, str]] = field(default_factory=list)
    retained_s: dict[TransferId, float] = field(default_factory=dict)
    steps: list[tuple[float, int, int]] = field(default_factory=list)
    itls: list[tuple[float, float]] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self.room.set()

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
        self.waiting.set()
        await self.room.wait()
        self.retained_s[transfer_id] = retain_s
        self.transfers[transfer_id] = MemoryKvTransfer(manifest.total_bytes)
        return self.transfers[transfer_id].sink

    async def open_source(self, ticket: KvTicket, *, deadline_s: float) -> KvSource:
        self.waiting.set()
        await self.room.wait()
        self.transfers[ticket.transfer_id] = MemoryKvTransfer(ticket.manifest.total_bytes)
        return self.transfers[ticket.transfer_id].source

    async def abort(self, transfer_id: TransferId, generation: Generation, fault: Fault) -> None:
        self.aborted.append((transfer_id, generation, fault.code))

    def report_step(self, *, step_s: float, kv_blocks_free: int, kv_block_tokens: int) -> None:
        self.steps.append((step_s, kv_blocks_free, kv_block_tokens))

    def report_itl(self, itl_ms: float, target_ms: float) -> None:
        self.itls.append((itl_ms, target_ms))

    async def close(self) -> None:
        self.closed = True


@dataclass
class Bench:
    """Sessions over a told engine and, once `attach`ed, a told link; what would be published lies in `sent`."""

    sessions: Sessions
    engine: ToldEngine
    link: ToldLink
    sent: list[Addressed]

    async def report(self, engine_id: RequestId, index: int, *tokens: int, finish: FinishReason | None = None) -> None:
        output = SequenceOutput(engine_id, index, token_ids=tokens, finish=finish)
        await self.sessions.take_report(StepReport((output,), 0.0, 0, 0))
        self.sessions.requests.check_invariants()

    def last(self) -> Addressed:
        return self.sent[-1]


@asynccontextmanager
async def worker_bench(*, relay: bool = True) -> AsyncIterator[Bench]:
    link, engine, sent = ToldLink(), ToldEngine(), list[Addressed]()
    log = structlog.get_logger()

    unused = [link]

    async def connect() -> ToldLink:
        return unused.pop() if unused else ToldLink()

    async def publish(events: list[Addressed]) -> None:
        sent.extend(events)

    async def changed() -> None:
        return

    attachment = Attachment(connect if relay else None, log)
    sessions = Sessions(
        worker=WORKER, engine=engine, attachment=attachment, publish=publish, metrics=Metrics(), log=log
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(attachment.run(changed, sessions.relay_lost))
        if relay:
            await attachment.attached.wait()
        yield Bench(sessions, engine, link, sent)
        task.cancel()
