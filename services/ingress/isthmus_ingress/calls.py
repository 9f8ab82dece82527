"""A saga's questions to planner and workers: what each says, how long it waits, what its answer means to the saga."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from structlog.typing import FilteringBoundLogger

from isthmus_ingress.cancels import Cancels
from isthmus_ingress.last_plan import LastPlan
from isthmus_ingress.releases import Releases
from isthmus_ingress.saga_types import Answered, AskRoute, Call, Save, SendCancel, Start, Submit
from isthmus_shared.bus.port import Bus
from isthmus_shared.errors import DeadlineExceeded, IsthmusError, NoResponders, ProtocolViolation
from isthmus_shared.ids import Generation, RequestId, TransferId
from isthmus_shared.kv.negotiate import kv_form
from isthmus_shared.messages import subjects
from isthmus_shared.messages.base import WireMessage
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.route import Route, RouteReply, RouteRequest, Slo, StagedKv
from isthmus_shared.messages.work import (
    Ack,
    Cancel,
    SamplingParams,
    SaveSequence,
    StartDecode,
    SubmitDecode,
    SubmitPrefill,
    SubmitReply,
)
from isthmus_shared.metrics import Metrics
from isthmus_shared.tracing import NullTracing, Tracing

ROUTE_TIMEOUT_S = 1.0
"""The planner answers out of its memory. Two tries of it fit in the 3 s within which a client learns that there is
no planner."""
ROUTE_HOLD_S = 1.0
"""How long a planner may hold an ask that waits in line: short, so that its death costs no more than this."""
WORKER_TIMEOUT_S = 5.0
"""For a submit or a start to be answered: workers answer at once, before they compute anything."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a saga's messages are made of."""

    request_id: RequestId
    transfer_id: TransferId
    model: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    prefix: tuple[bytes, ...] = ()
    """Of the prompt, see `isthmus_shared.prefix`."""
    tenant: str = ""
    slo: Slo | None = None


@dataclass(frozen=True, slots=True)
class Deps:
    """What all sagas of an ingress share."""

    bus: Bus
    events_subject: str
    tasks: asyncio.TaskGroup
    """Outlives any one request: a Cancel goes on when its client has long left."""
    cancels: Cancels
    metrics: Metrics
    log: FilteringBoundLogger
    tracing: Tracing = field(default_factory=NullTracing)
    itl_target_s: float = 0.0
    """Between two tokens of a stream; 0 is none."""
    last_plan: LastPlan = field(default_factory=LastPlan)
    """Routes while no planner answers."""
    releases: Releases | None = None
    """None: whoever retains something for us finds out by its own deadline."""


Headers = Mapping[str, str] | None


class Calls:
    """One request's. Only `route` raises; a worker's fault or silence is part of the event that the others return."""

    def __init__(self, work: Work, deps: Deps) -> None:
        self._work, self._deps = work, deps
        self._loop = asyncio.get_running_loop()
        self._in_line_s: float | None = None
        """Since when; None until it asks."""

    async def route(
        self, effect: AskRoute, output: tuple[int, ...], headers: Headers, wanted: Callable[[], bool]
    ) -> Route | None:
        """The planner's answer, whose line it may have to wait in; while there is no planner, by the last plan.

        `wanted`: whether its saga still waits for it; None: it did not, and nothing came.
        """
        request = self._route_request(effect, len(output))
        hold_s = 0.0 if request.slo is None else ROUTE_HOLD_S
        while True:
            # By what it has waited, any planner that is asked knows its place in line.
            now_s = self._loop.time()
            self._in_line_s = now_s if self._in_line_s is None else self._in_line_s
            held = {"waited_s": now_s - self._in_line_s, "patience_s": hold_s}
            route = await self._ask_route(request.model_copy(update=held) if hold_s else request, headers)
            if route is not None or not wanted():
                return route
            hold_s = ROUTE_HOLD_S

    async def _ask_route(self, request: RouteRequest, headers: Headers) -> Route | None:
        """None: it is still in line."""
        last_plan = self._deps.last_plan
        if last_plan.planner_is_silent(now_s=self._loop.time()):
            route = self._planned(request)
            if route is not None:
                return route
        try:
            answer = await self._deps.bus.request(
                subjects.ROUTE, request.encode(), timeout_s=ROUTE_TIMEOUT_S + request.patience_s, headers=headers
            )
        except (NoResponders, DeadlineExceeded) as error:
            if isinstance(error, DeadlineExceeded):
                last_plan.silence(now_s=self._loop.time())
            route = self._planned(request)
            if route is None:
                raise
            return route
        reply = RouteReply.decode(answer.data)
        if reply.fault is not None:
            raise reply.fault.to_error()
        if reply.route is None and reply.queued is None:
            raise ProtocolViolation("the planner answered with neither a route nor a fault")
        return reply.route

    def _route_request(self, effect: AskRoute, output_tokens: int) -> RouteRequest:
        work = self._work
        return RouteRequest(
            request_id=work.request_id,
            model=work.model,
            isl_tokens=len(work.prompt) + output_tokens,
            max_osl_tokens=max(1, work.sampling.max_tokens - output_tokens),
            exclude=effect.exclude,
            prefix=work.prefix,
            tenant=work.tenant,
            slo=None if output_tokens or effect.exclude else work.slo,  # else what it was promised is late anyway
            staged=_staged(effect, len(work.prompt) + output_tokens),
        )

    def _planned(self, request: RouteRequest) -> Route | None:
        route = self._deps.last_plan.route(request, now_s=self._loop.time())
        if route is not None:
            self._deps.metrics.routes_by_last_plan.inc()
        return route

    async def submit(self, effect: Submit, headers: Headers) -> Answered:
        common = {
            "request_id": self._work.request_id,
            "generation": effect.generation,
            "incarnation": effect.worker.incarnation,
            "events_subject": self._deps.events_subject,
            "token_ids": self._work.prompt + effect.output,
            "output_offset": len(effect.output),
            "sampling": self._work.sampling,
            "cache_salt": self._work.cache_salt,
        }
        message: WireMessage
        if effect.role is Role.PREFILL:
            call, subject = Call.PREFILL, subjects.worker_prefill(effect.worker.worker_id)
            times = {"deadline_s": effect.deadline_s, "retain_s": effect.retain_s}
            message = SubmitPrefill(transfer_id=self._work.transfer_id, **times, **common)
        else:
            call, subject = Call.DECODE, subjects.worker_decode(effect.worker.worker_id)
            message = SubmitDecode(ticket=effect.ticket, transfer_deadline_s=effect.deadline_s, **common)
        return await self._staging(call, effect.generation, subject, message, headers)

    async def save(self, effect: Save, headers: Headers) -> Answered:
        message = SaveSequence(
            request_id=self._work.request_id,
            generation=effect.generation,
            incarnation=effect.worker.incarnation,
            transfer_id=self._work.transfer_id,
            transfer_generation=effect.transfer_generation,
            deadline_s=effect.deadline_s,
            retain_s=effect.retain_s,
        )
        subject = subjects.worker_save(effect.worker.worker_id)
        return await self._staging(Call.SAVE, effect.transfer_generation, subject, message, headers)

    async def _staging(
        self, call: Call, generation: Generation, subject: str, message: WireMessage, headers: Headers
    ) -> Answered:
        """What is answered by a SubmitReply."""
        try:
            answer = await self._deps.bus.request(
                subject, message.encode(), timeout_s=WORKER_TIMEOUT_S, headers=headers
            )
            reply = SubmitReply.decode(answer.data)
        except IsthmusError as error:
            return Answered(call, generation, error=error)
        fault = reply.fault.to_error() if reply.fault is not None else None
        return Answered(call, generation, reply.ticket, fault)

    async def start(self, effect: Start, headers: Headers) -> Answered:
        message = StartDecode(
            request_id=self._work.request_id,
            generation=effect.generation,
            incarnation=effect.worker.incarnation,
            first_token_id=effect.first_token_id,
        )
        error: IsthmusError | None = None
        try:
            subject = subjects.worker_start(effect.worker.worker_id)
            answer = await self._deps.bus.request(
                subject, message.encode(), timeout_s=WORKER_TIMEOUT_S, headers=headers
            )
            fault = Ack.decode(answer.data).fault
            error = fault.to_error() if fault is not None else None
        except IsthmusError as failure:
            error = failure
        return Answered(Call.START, effect.generation, error=error)

    async def cancel(self, effect: SendCancel) -> None:
        message = Cancel(
            request_id=self._work.request_id,
            generation=effect.generation,
            incarnation=effect.worker.incarnation,
            reason=effect.reason,
        )
        await self._deps.cancels.send(effect.worker.worker_id, message)


def _staged(effect: AskRoute, known_tokens: int) -> StagedKv | None:
    """What is staged already, or will be by the worker that gives the sequence away."""
    if effect.staged is not None:
        manifest = effect.staged.manifest
        return StagedKv(
            relay=effect.staged.source,
            tokens=manifest.prompt_tokens,
            model_fingerprint=manifest.model_fingerprint,
            kv_form=kv_form(manifest),
        )
    if effect.moving is not None:
        there = effect.moving
        return StagedKv(
            relay=there.relay,
            tokens=known_tokens - 1,
            model_fingerprint=there.model_fingerprint,
            kv_form=there.kv_form,
        )
    return None
