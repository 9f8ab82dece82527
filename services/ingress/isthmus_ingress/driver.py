"""Does what a saga decides: sends its requests over the bus, keeps its timer, hands its tokens on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar, assert_never

from isthmus_ingress.calls import Calls
from isthmus_ingress.calls import Deps as Deps
from isthmus_ingress.calls import Work as Work
from isthmus_ingress.itl_ledger import Excursion, ItlLedger
from isthmus_ingress.outbox import Outbox
from isthmus_ingress.saga import Saga
from isthmus_ingress.saga_types import (
    AskRoute,
    Begin,
    ClientGone,
    Deliver,
    Effect,
    End,
    Event,
    MoveWanted,
    Noted,
    Output,
    Replanned,
    Routed,
    RouteFailed,
    Save,
    SendCancel,
    SendRelease,
    Start,
    StepBroke,
    Submit,
    Tick,
)
from isthmus_shared.errors import IsthmusError
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.quick import Facts, QuickEvent, QuickSteps
from isthmus_shared.messages.route import Route
from isthmus_shared.messages.work import (
    SequenceEvent,
)
from isthmus_shared.tracing import NULL_SPAN, Span

E = TypeVar("E", AskRoute, Submit, Start, Save, SendCancel, SendRelease)
Said = tuple[QuickSteps, QuickEvent]
"""An event, and the message that it came in."""


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
        self._move_over: asyncio.Event | None = None
        self._calls = Calls(work, deps)
        self.ledger = ItlLedger(target_s=deps.itl_target_s)

    @property
    def known_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.work.prompt) + len(self.saga.output)

    def start(self) -> None:
        self.feed(Begin())

    async def move(self, wanted: MoveWanted) -> None:
        """Returns when its sequence has left that worker, or stays there."""
        over = self._move_over = asyncio.Event()
        self.feed(wanted)
        if self.saga.moving:
            await over.wait()

    def feed(self, event: Event) -> None:
        """Handle an event now. Never waits."""
        ended = self._execute(self.saga.handle(event, now_s=self._loop.time()))
        if self._move_over is not None and not self.saga.moving:
            self._move_over.set()
            self._move_over = None
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

    def flow_together(self, said: Sequence[Said], now_s: float) -> bool:
        """`flow` of some events that came at the same time, without a finish. False: one of them is not usual, and
        none was taken."""
        flow, (steps, first) = self.saga.flow, said[0]
        if flow is None:
            return False
        incarnation, generation, index = steps.worker.incarnation, first.generation, first.output_index
        token_ids: list[int] = []
        for each, event in said:
            if (
                event.output_index != index + len(token_ids)
                or event.generation != generation
                or event.finish is not None
                or event.cached_tokens
                or not event.token_ids
                or each.worker.incarnation != incarnation
            ):
                return False
            token_ids += event.token_ids
        run = tuple(token_ids)
        if not flow.take(incarnation, QuickEvent(first.request_id, generation, index, run), now_s):
            return False
        if not self._outbox.flow(self._index, run):
            self._loop.call_soon(self.feed, ClientGone())
        late = self.ledger.take(now_s, len(first.token_ids), incarnation, steps.step)
        if late is not None:
            self._note_late(late, len(run))
        self.ledger.more_at_once(len(said) - 1, said[-1][0].step)
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
                case Save():
                    self._spawn(self._save, effect)
                case SendCancel():
                    self._spawn(self._cancel, effect)
                case SendRelease():
                    releases = self._deps.releases
                    if releases is not None and releases.add(effect.worker, self.work.request_id, effect.generation):
                        self._spawn(self._release, effect)
                case Noted():
                    self._deps.metrics.recoveries.labels(effect.what).inc()
                    self._deps.log.info(
                        f"request.{effect.what}",
                        request_id=self.work.request_id,
                        generation=self.saga.generation,
                        output_tokens=len(self.saga.output),
                    )
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
        if self._deps.tracing.enabled and effect.moving is None:
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
        def wanted() -> bool:
            return not self.saga.over and self.saga.generation == effect.generation

        span = self._deps.tracing.begin("route", self._attempt.traceparent)
        try:
            route = await self._calls.route(effect, tuple(self.saga.output), span.headers, wanted)
        except IsthmusError as error:
            span.end(error=error.code)
            self.feed(RouteFailed(effect.generation, error))
            return
        if route is None:
            span.end(error="given_up")
            return
        span.end(mode=route.mode.value, decode=route.decode.worker_id)
        if effect.moving is None:
            self.route = route
            if self.routed_s is None:
                self.routed_s = self._loop.time()
        self.feed(Routed(effect.generation, route))

    async def _submit(self, effect: Submit) -> None:
        self.feed(await self._calls.submit(effect, self._attempt.headers))

    async def _start(self, effect: Start) -> None:
        self.feed(await self._calls.start(effect, self._attempt.headers))

    async def _save(self, effect: Save) -> None:
        self.feed(await self._calls.save(effect, self._attempt.headers))

    async def _cancel(self, effect: SendCancel) -> None:
        await self._calls.cancel(effect)

    async def _release(self, effect: SendRelease) -> None:
        assert self._deps.releases is not None
        await self._deps.releases.send(effect.worker)
