"""Does what a saga decides: sends its requests over the bus, keeps its timer, hands its tokens on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar, assert_never

from structlog.typing import FilteringBoundLogger

from isthmus_ingress.cancels import Cancels
from isthmus_ingress.itl_ledger import Excursion, ItlLedger
from isthmus_ingress.last_plan import LastPlan
from isthmus_ingress.outbox import Outbox
from isthmus_ingress.saga import Saga
from isthmus_ingress.saga_types import (
    Answered,
    AskRoute,
    Begin,
    Call,
    ClientGone,
    Deliver,
    Effect,
    End,
    Event,
    Output,
    Replanned,
    Routed,
    RouteFailed,
    SendCancel,
    Start,
    StepBroke,
    Submit,
    Tick,
)
from isthmus_shared.bus.port import Bus
from isthmus_shared.errors import DeadlineExceeded, IsthmusError, NoResponders, ProtocolViolation
from isthmus_shared.ids import Generation, Incarnation, RequestId, TransferId
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.quick import Facts, QuickEvent
from isthmus_shared.messages.route import Route, RouteReply, RouteRequest, Slo
from isthmus_shared.messages.work import (
    Ack,
    Cancel,
    SamplingParams,
    SequenceEvent,
    StartDecode,
    SubmitDecode,
    SubmitPrefill,
    SubmitReply,
)
from isthmus_shared.metrics import Metrics
from isthmus_shared.tracing import NULL_SPAN, NullTracing, Span, Tracing

E = TypeVar("E", AskRoute, Submit, Start, SendCancel)

ROUTE_TIMEOUT_S = 1.0
"""The planner answers out of its memory. Two tries of it fit in the 3 s within which a client learns that there is
no planner."""
ROUTE_HOLD_S = 1.0
"""How long a planner may hold an ask that waits in line: short, so that its death costs no more than this."""
LEAST_WAIT_S = 0.05
"""Less is no wait in line, but the way there."""
WORKER_TIMEOUT_S = 5.0
"""For a submit or a start to be answered: workers answer at once, before they compute anything."""


class _GivenUp(Exception):
    """The request has ended while it waited for a route."""


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


class RunningSaga:
    """One saga on the event loop. `on_end` is called once, right after its End went to the outbox."""

    def __init__(
        self,
        saga: Saga,
        work: Work,
        deps: Deps,
        outbox: Outbox,
        index: int,
        on_end: Callable[[RunningSaga], None],
        *,
        parent: Span = NULL_SPAN,
    ) -> None:
        self.saga, self.work = saga, work
        self._deps, self._outbox, self._index, self._on_end = deps, outbox, index, on_end
        self._loop = asyncio.get_running_loop()
        self.begun_s = self._loop.time()
        self._parent, self._attempt = parent, parent
        """Spans: the request's, and the latest attempt's."""
        self.route: Route | None = None
        """The latest."""
        self.routed_s: float | None = None
        """When it came the first time."""
        self.cached_tokens = 0
        self.ended: End | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.ledger = ItlLedger(target_s=deps.itl_target_s)

    def start(self) -> None:
        self.feed(Begin())

    def feed(self, event: Event) -> None:
        """Handle an event now. Never waits."""
        ended = self._execute(self.saga.handle(event, now_s=self._loop.time()))
        if ended:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._on_end(self)
        elif not self.saga.over and (self._timer is None or self.saga.wake_at_s < self._timer.when()):
            self._arm()

    def take(self, incarnation: Incarnation, event: SequenceEvent, step: Facts | None) -> None:
        """A worker's event, and what it says of the step behind it."""
        known = len(self.saga.output)
        self.feed(Output(incarnation, event))
        tokens = len(self.saga.output) - known
        if tokens:
            late = self.ledger.take(self._loop.time(), tokens, incarnation, step)
            if late is not None:
                self._note_late(late, tokens)

    def flow(self, incarnation: Incarnation, event: QuickEvent, step: Facts | None, now_s: float) -> bool:
        """`take` for the usual event, in a tenth of the time; False when it is not one."""
        flow = self.saga.flow
        if flow is None or event.cached_tokens or not flow.take(incarnation, event, now_s):
            return False
        token_ids = event.token_ids
        if not self._outbox.flow(self._index, token_ids):
            self._loop.call_soon(self.feed, ClientGone())
        late = self.ledger.take(now_s, len(token_ids), incarnation, step)
        if late is not None:
            self._note_late(late, len(token_ids))
        return True

    def _note_late(self, late: Excursion, tokens: int) -> None:
        self._deps.metrics.itl_excursions.labels(late.cause).inc()
        self._deps.log.debug(
            "itl.excursion",
            request_id=self.work.request_id,
            output_index=len(self.saga.output) - tokens,
            cause=late.cause.value,
            itl_s=round(late.itl_s, 6),
            median_s=round(late.median_s, 6),
        )

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self.saga.wake_at_s, self._on_timer)

    def _on_timer(self) -> None:
        # Tokens move the saga's next deadline without touching the timer; so it may be early, and is set again.
        self._timer = None
        self.feed(Tick())

    def _execute(self, effects: list[Effect]) -> bool:
        ended = False
        for effect in effects:
            match effect:
                case Deliver():
                    if effect.cached_tokens:
                        self.cached_tokens = effect.cached_tokens
                    if not self._outbox.put(self._index, effect):
                        self._loop.call_soon(self.feed, ClientGone())
                case End():
                    self._outbox.put(self._index, effect)
                    self._end_attempt("" if effect.error is None else effect.error.code)
                    self.ended = effect
                    ended = True
                case AskRoute():
                    self._begin_attempt(effect)
                    self._spawn(self._ask_route, effect)
                case Submit():
                    self._spawn(self._submit, effect)
                case Start():
                    self._spawn(self._start, effect)
                case SendCancel():
                    self._spawn(self._cancel, effect)
                case Replanned():
                    self._deps.metrics.replans.labels(effect.error.code).inc()
                    self._deps.log.warning(
                        "request.replanned",
                        request_id=self.work.request_id,
                        generation=effect.generation,
                        code=effect.error.code,
                        error=effect.error.text,
                        output_tokens=len(self.saga.output),
                    )
                case _:
                    assert_never(effect)
        return ended

    def _begin_attempt(self, effect: AskRoute) -> None:
        if self._deps.tracing.enabled:
            self._end_attempt(self.saga.error.code if self.saga.error is not None else "")
            self._attempt = self._deps.tracing.begin(
                "attempt",
                self._parent.traceparent,
                request_id=self.work.request_id,
                generation=effect.generation,
                isl_tokens=len(self.work.prompt),
            )

    def _end_attempt(self, error: str) -> None:
        if self._attempt is not self._parent:
            self._attempt.end(error=error, output_tokens=len(self.saga.output))

    def _spawn(self, step: Callable[[E], Awaitable[None]], effect: E) -> None:
        self._deps.tasks.create_task(self._guarded(step, effect))

    async def _guarded(self, step: Callable[[E], Awaitable[None]], effect: E) -> None:
        """All requests' steps run in one TaskGroup: an exception that left one would end them all."""
        try:
            await step(effect)
        except Exception:  # whatever a bug raises ends its own request, typed, and is logged with its traceback
            self._deps.log.exception("request.step_broke", request_id=self.work.request_id)
            self.feed(StepBroke(IsthmusError("the ingress met a bug in this request", todo="see its log")))

    async def _ask_route(self, effect: AskRoute) -> None:
        request = RouteRequest(
            request_id=self.work.request_id,
            model=self.work.model,
            isl_tokens=len(self.work.prompt) + len(self.saga.output),
            max_osl_tokens=max(1, self.work.sampling.max_tokens - len(self.saga.output)),
            exclude=effect.exclude,
            prefix=self.work.prefix,
            tenant=self.work.tenant,
            slo=self.work.slo if self.saga.attempts == 0 else None,  # what it was promised is late anyway then
        )
        span = self._deps.tracing.begin("route", self._attempt.traceparent)
        try:
            route = await self._route(request, span, effect.generation)
        except _GivenUp:
            span.end(error="given_up")
            return
        except IsthmusError as error:
            span.end(error=error.code)
            self.feed(RouteFailed(effect.generation, error))
            return
        span.end(mode=route.mode.value, decode=route.decode.worker_id)
        self.route = route
        if self.routed_s is None:
            self.routed_s = self._loop.time()
        self.feed(Routed(effect.generation, route))

    async def _route(self, request: RouteRequest, span: Span, generation: Generation) -> Route:
        """The planner's answer, whose line it may have to wait in; while there is no planner, by the last plan."""
        hold_s = 0.0 if request.slo is None else ROUTE_HOLD_S
        while True:
            # By what it has waited, any planner that is asked knows its place in line.
            waited_s = self._loop.time() - self.begun_s
            held = {"waited_s": waited_s if waited_s >= LEAST_WAIT_S else 0.0, "patience_s": hold_s}
            route = await self._ask(request.model_copy(update=held) if hold_s else request, span)
            hold_s = ROUTE_HOLD_S
            if route is not None:
                return route
            if self.saga.over or self.saga.generation != generation:
                raise _GivenUp

    async def _ask(self, request: RouteRequest, span: Span) -> Route | None:
        """None: it is still in line."""
        last_plan = self._deps.last_plan
        if last_plan.planner_is_silent(now_s=self._loop.time()):
            route = self._planned(request)
            if route is not None:
                return route
        try:
            answer = await self._deps.bus.request(
                subjects.ROUTE, request.encode(), timeout_s=ROUTE_TIMEOUT_S + request.patience_s, headers=span.headers
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

    def _planned(self, request: RouteRequest) -> Route | None:
        route = self._deps.last_plan.route(request, now_s=self._loop.time())
        if route is not None:
            self._deps.metrics.routes_by_last_plan.inc()
        return route

    async def _submit(self, effect: Submit) -> None:
        common = {
            "request_id": self.work.request_id,
            "generation": effect.generation,
            "incarnation": effect.worker.incarnation,
            "events_subject": self._deps.events_subject,
            "token_ids": self.work.prompt + effect.output,
            "output_offset": len(effect.output),
            "sampling": self.work.sampling,
            "cache_salt": self.work.cache_salt,
        }
        if effect.role is Role.PREFILL:
            call, subject = Call.PREFILL, subjects.worker_prefill(effect.worker.worker_id)
            data = SubmitPrefill(transfer_id=self.work.transfer_id, deadline_s=effect.deadline_s, **common).encode()
        else:
            call, subject = Call.DECODE, subjects.worker_decode(effect.worker.worker_id)
            data = SubmitDecode(ticket=effect.ticket, transfer_deadline_s=effect.deadline_s, **common).encode()
        try:
            headers = self._attempt.headers
            answer = await self._deps.bus.request(subject, data, timeout_s=WORKER_TIMEOUT_S, headers=headers)
            reply = SubmitReply.decode(answer.data)
        except IsthmusError as error:
            self.feed(Answered(call, effect.generation, error=error))
            return
        fault = reply.fault.to_error() if reply.fault is not None else None
        self.feed(Answered(call, effect.generation, reply.ticket, fault))

    async def _start(self, effect: Start) -> None:
        message = StartDecode(
            request_id=self.work.request_id,
            generation=effect.generation,
            incarnation=effect.worker.incarnation,
            first_token_id=effect.first_token_id,
        )
        error: IsthmusError | None = None
        try:
            subject = subjects.worker_start(effect.worker.worker_id)
            answer = await self._deps.bus.request(
                subject, message.encode(), timeout_s=WORKER_TIMEOUT_S, headers=self._attempt.headers
            )
            fault = Ack.decode(answer.data).fault
            error = fault.to_error() if fault is not None else None
        except IsthmusError as failure:
            error = failure
        self.feed(Answered(Call.START, effect.generation, error=error))

    async def _cancel(self, effect: SendCancel) -> None:
        message = Cancel(
            request_id=self.work.request_id,
            generation=effect.generation,
            incarnation=effect.worker.incarnation,
            reason=effect.reason,
        )
        await self._deps.cancels.send(effect.worker.worker_id, message)
