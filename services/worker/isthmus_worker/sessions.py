"""The worker's requests between bus, engine and relay: who gets in, what comes out, what is freed.

Freeing follows one rule: what the engine holds, the engine ends. A record that ends early while its sequence is in
the engine is *closing* until the engine says that it has let go; only then is the transfer aborted at the relay, so
that no staging slot is reused while an engine may still write to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from isthmus_shared.engines.port import Engine, EngineRequest, SequenceOutput, StepReport
from isthmus_shared.errors import Cancelled, DeadlineExceeded, Draining, Fault, IsthmusError, StaleParty, Unavailable
from isthmus_shared.ids import Incarnation, RequestId
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.work import (
    Ack,
    Cancel,
    FinishReason,
    Release,
    SequenceEvent,
    StartDecode,
    SubmitDecode,
    SubmitPrefill,
    WorkerRef,
)
from isthmus_shared.metrics import Metrics
from isthmus_shared.tracing import NullTracing, Tracing, incoming
from isthmus_worker.attachment import Attachment
from isthmus_worker.liveness import IngressLife
from isthmus_worker.outbox import Addressed
from isthmus_worker.requests import Flow, Phase, Record, Requests
from isthmus_worker.work_trace import WorkTrace

Publish = Callable[[list[Addressed]], Awaitable[None]]

REPLACED = Fault(code=Cancelled.code, what="a newer attempt at this request has come")
LET_GO_S = 2.0
"""For an engine's step to end, and with it an older attempt."""
RELEASED = Fault(code=Cancelled.code, what="the request is over")
DEADLINE = Fault(
    code=DeadlineExceeded.code,
    what="the transfer's deadline has passed",
    why="its KV was not committed on the decode side in time",
    todo="plan the request anew",
)


@dataclass(frozen=True, slots=True)
class _Closing:
    """A record whose sequence the engine is about to let go, and its transfer with it."""

    record: Record
    fault: Fault


class Sessions:
    def __init__(
        self,
        *,
        worker: WorkerRef,
        engine: Engine,
        attachment: Attachment,
        publish: Publish,
        metrics: Metrics,
        log: FilteringBoundLogger,
        tracing: Tracing | None = None,
    ) -> None:
        self.worker = worker
        self.engine = engine
        self.attachment = attachment
        self.requests = Requests()
        self.life = IngressLife()
        self.draining = False
        self.idle = asyncio.Event()
        """Set while the engine works for nobody."""
        self.idle.set()
        self.deadlines_changed = asyncio.Event()
        self.closed: set[Role] = set()
        """Roles that take nothing new in any more."""
        self._role_idle: dict[Role, asyncio.Event] = {}
        self._publish = publish
        self._metrics = metrics
        self._log = log
        self._tracing = tracing or NullTracing()
        self._closing: dict[RequestId, _Closing] = {}
        self._claims: dict[Flow, asyncio.Event] = {}
        """Flows that are being fetched here; set when one is let go."""

    # ------------------------------------------------------------------ in

    def check_party(self, incarnation: Incarnation) -> None:
        """Refuses a message that was meant for another life of this worker."""
        if incarnation != self.worker.incarnation:
            raise StaleParty(
                f"worker {self.worker.worker_id} has restarted",
                why=f"the message names incarnation {incarnation}, this is {self.worker.incarnation}",
                todo="plan the request anew",
            )

    async def admit(self, record: Record, incarnation: Incarnation) -> None:
        """Takes a request in, ending an older attempt at it; raises the typed refusal."""
        self.check_party(incarnation)
        if self.draining:
            raise Draining(f"worker {self.worker.worker_id} is draining", retry_after_s=1.0)
        role = Role.PREFILL if record.is_prefill else Role.DECODE
        if role in self.closed:
            raise Draining(
                f"worker {self.worker.worker_id} has given up the role {role.value}",
                todo="plan the request anew",
                retry_after_s=1.0,
            )
        replaced = self.requests.admit(record)
        self.idle.clear()
        record.admitted_s = asyncio.get_running_loop().time()
        if self._tracing.enabled and (parent := incoming.get()):
            names = {"worker": self.worker.worker_id, "request": record.request_id}
            record.trace = WorkTrace(self._tracing, parent, **names)
        self.life.expect(record.events_subject, record.admitted_s)
        self.deadlines_changed.set()
        if replaced is not None:
            await self._free(replaced, REPLACED)

    def to_engine(self, record: Record, message: SubmitPrefill | SubmitDecode) -> None:
        """The engine takes the request, and with it the sink or source; or it raises what it refuses."""
        ticket = message.ticket if isinstance(message, SubmitDecode) else None
        if record.trace is not None:
            record.trace.submitted()
            record.sink = None if record.sink is None else record.trace.sink(record.sink)
            record.source = None if record.source is None else record.trace.source(record.source)
        self.engine.submit(
            EngineRequest(
                request_id=record.engine_id,
                token_ids=message.token_ids,
                sampling=message.sampling,
                output_offset=message.output_offset,
                kv_save=record.sink,
                kv_load=record.source,
                kv_manifest=None if ticket is None else ticket.manifest,
                cache_salt=message.cache_salt,
            )
        )
        record.phase = Phase.ACTIVE
        if record.source is None:
            self._metrics.prefix_cache_queries.inc(len(message.token_ids))
        if record.first_token_id is not None:
            self.engine.start_decode(record.engine_id, record.first_token_id)

    async def claim_flow(self, record: Record) -> None:
        """Before its source is opened: an earlier attempt of this worker's at the same flow must have let go of it.

        Raises `Unavailable` if that takes too long.
        """
        flow = record.flow
        assert flow is not None
        try:
            async with asyncio.timeout(LET_GO_S):
                while (earlier := self._claims.get(flow)) is not None:
                    await earlier.wait()
        except TimeoutError:
            raise Unavailable(
                f"an earlier attempt at request {record.request_id} is still being ended", retry_after_s=1.0
            ) from None
        self._claims[flow] = asyncio.Event()
        record.claimed = True

    def _let_go(self, record: Record) -> None:
        """Nothing here touches its flow any more."""
        if record.claimed and record.flow is not None:
            record.claimed = False
            self._claims.pop(record.flow).set()

    def not_in_engine(self, record: Record, fault: Fault) -> None:
        """The submit came to nothing: what was opened for it is given back."""
        self.requests.end(record)
        if record.sink is not None:
            record.sink.abort(fault)
        if record.source is not None:
            record.source.release()
        self._let_go(record)
        self._note_idle()

    def wanted(self, record: Record) -> None:
        """Raises `Cancelled` if the record ended while its submit was waiting for something."""
        if not self.requests.holds(record):
            raise Cancelled(f"request {record.request_id} was cancelled while it was being submitted")

    async def start_decode(self, message: StartDecode) -> Ack:
        self.check_party(message.incarnation)
        record = self.requests.find(message.request_id, message.generation)
        if record is None:
            raise StaleParty(
                f"request {message.request_id} generation {message.generation} is not here",
                why="it ended, or its submit never came",
                todo="plan the request anew",
            )
        if record.first_token_id is None:
            record.first_token_id = message.first_token_id
            if record.phase is not Phase.OPENING:
                self.engine.start_decode(record.engine_id, message.first_token_id)
        return Ack()

    async def cancel(self, message: Cancel) -> Ack:
        """Ends everything held for that generation and older ones. Nothing held is as good."""
        self.check_party(message.incarnation)
        record = self.requests.cancel(message.request_id, message.generation)
        if record is not None:
            self._log.info("request.cancelled", request=record.request_id, reason=message.reason)
            await self._free(record, Fault(code=Cancelled.code, what=f"the ingress cancelled: {message.reason}"))
        return Ack()

    async def release(self, message: Release) -> None:
        """Those requests are over: what is staged or retained for them is nobody's any more."""
        if message.incarnation != self.worker.incarnation:
            return
        for each in message.released:
            record = self.requests.find(each.request_id, each.generation)
            if record is not None and record.phase is Phase.STAGED:
                self.requests.end(record)
                await self._free(record, RELEASED)

    # ----------------------------------------------------------------- out

    async def take_report(self, report: StepReport) -> None:
        """One engine step: its outputs go to their ingresses, one message each."""
        events: list[Addressed] = []
        for output in report.outputs:
            event = await self._take(output)
            if event is not None:
                events.append(event)
        self._note_idle()
        if events:
            await self._publish(events)

    async def _take(self, output: SequenceOutput) -> Addressed | None:
        record = self.requests.by_engine_id(output.request_id)
        if record is None:
            if output.finish is not None:
                await self._close(output.request_id)
            return None
        event = SequenceEvent(
            request_id=record.request_id,
            generation=record.generation,
            output_index=output.output_index,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            finish=output.finish,
            fault=output.fault,
            cached_tokens=self._note_cached(record, output),
        )
        record.next_index = output.output_index + len(output.token_ids)
        if record.trace is not None:
            record.trace.output(output)
        phase = "prefill" if record.is_prefill else "decode"
        if output.finish is not None:
            self._metrics.worker_finishes.labels(phase, output.finish.value).inc()
        if output.finish is FinishReason.HANDOFF:
            self._metrics.worker_kv_out_bytes.inc(0 if record.sink is None else record.sink.total_bytes)
            self.requests.stage(record)
        elif output.finish is not None:
            self.requests.end(record)
            self._let_go(record)
            if record.is_prefill:  # no hand-over follows, so nobody will fetch what was staged
                await self._abort_transfer(record.flow, _no_handover(output))
        elif not record.is_prefill and record.phase is not Phase.STREAMING:
            record.phase = Phase.STREAMING
            self._note_landed(record)
        return record.events_subject, event

    def _note_cached(self, record: Record, output: SequenceOutput) -> int:
        """Tokens of the prompt that cost nothing here: told once, and never of a prompt whose KV was loaded."""
        if record.phase is not Phase.ACTIVE or record.source is not None:
            return 0
        self._metrics.prefix_cache_hits.inc(output.cached_tokens)
        return output.cached_tokens

    def _note_landed(self, record: Record) -> None:
        """The engine has taken the KV over, and let go of the source."""
        if record.source is not None:
            self._metrics.worker_kv_in_bytes.inc(record.source.total_bytes)
            took_s = asyncio.get_running_loop().time() - record.admitted_s
            self._metrics.worker_transfer_seconds.observe(took_s)
            record.source = None
            self._let_go(record)

    async def fail(self, records: list[Record], fault: Fault) -> None:
        """Ends those records and tells their ingresses why."""
        events: list[Addressed] = []
        for record in records:
            if self.requests.end(record) is None:
                continue
            if record.needs_relay:
                self._metrics.worker_transfers_failed.labels(fault.code).inc()
            if record.phase is Phase.STAGED:  # its part was done; as a rule decode has long taken the KV
                self._log.debug("request.lease_ended", request=record.request_id, code=fault.code)
            else:
                self._log.warning("request.failed", request=record.request_id, code=fault.code, why=fault.why)
                events.append((record.events_subject, _failed(record, fault)))
            await self._free(record, fault)
        if events:
            await self._publish(events)

    async def relay_lost(self, fault: Fault) -> None:
        """What was crossing is lost; sequences whose KV is in the engine go on."""
        self.requests.forget_staged()
        await self.fail(self.requests.needing_relay(), fault)

    # -------------------------------------------------------------- freeing

    async def _free(self, record: Record, fault: Fault) -> None:
        """Frees what an ended record holds."""
        if record.trace is not None and record.phase is not Phase.STAGED:
            record.trace.failed(fault)
        match record.phase:
            case Phase.OPENING:
                await self._abort_transfer(record.flow, fault)  # hastens a waiting open
            case Phase.ACTIVE | Phase.STREAMING:
                if record.holds_flow:
                    self._closing[record.engine_id] = _Closing(record, fault)
                self.engine.abort(record.engine_id)
            case Phase.STAGED:
                await self._abort_transfer(record.flow, fault)
        self._note_idle()

    async def _close(self, engine_id: RequestId) -> None:
        """The engine has let go of a sequence whose record had ended before."""
        closing = self._closing.pop(engine_id, None)
        if closing is not None:
            await self._abort_transfer(closing.record.flow, closing.fault)
            self._let_go(closing.record)

    async def _abort_transfer(self, flow: Flow | None, fault: Fault) -> None:
        link = self.attachment.link
        if flow is None or link is None or link.lost.is_set():
            return
        try:
            await link.abort(*flow, fault)
        except IsthmusError as error:
            self._log.warning("transfer.abort_failed", transfer=flow[0], error=error.text)

    async def no_more_of(self, role: Role) -> None:
        """Returns once the engine works for no request of that role."""
        event = self._role_idle.setdefault(role, asyncio.Event())
        self._note_idle()
        try:
            await event.wait()
        finally:
            self._role_idle.pop(role, None)

    def _note_idle(self) -> None:
        if self.requests.unfinished == 0 and not self._closing:
            self.idle.set()
        for role, event in self._role_idle.items():
            if not self.requests.has_unfinished(prefill=role is Role.PREFILL):
                event.set()


def _no_handover(output: SequenceOutput) -> Fault:
    return output.fault or Fault(code=Cancelled.code, what="the sequence ended with its first token")


def _failed(record: Record, fault: Fault) -> SequenceEvent:
    return SequenceEvent(
        request_id=record.request_id,
        generation=record.generation,
        output_index=record.next_index,
        finish=FinishReason.ERROR,
        fault=fault,
    )
