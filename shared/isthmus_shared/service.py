"""What every service stands on: identity, bus, metrics, health pages, and loops that survive the bus' absence."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Generic, Self

import structlog
from structlog.typing import FilteringBoundLogger
from typing_extensions import TypeVar

import isthmus_shared
from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.bus.port import Bus, BusMessage
from isthmus_shared.bus.previous import PreviousVersionBus
from isthmus_shared.bus.subscribing import subscribed
from isthmus_shared.bus.syntax import is_inbox
from isthmus_shared.config import ServiceConfig
from isthmus_shared.errors import BusDisconnected, Fault, IsthmusError, PayloadTooLarge
from isthmus_shared.health import HealthServer, Page
from isthmus_shared.ids import Incarnation, new_incarnation
from isthmus_shared.messages.base import PREVIOUS, WireMessage
from isthmus_shared.messages.health import ProcessState
from isthmus_shared.metrics import CONTENT_TYPE, Metrics
from isthmus_shared.micro import Endpoint, MicroService
from isthmus_shared.tracing import HEADER, NULL_SPAN, NullTracing, Span, Tracing, checked, incoming, open_tracing

M = TypeVar("M", bound=WireMessage)
R = TypeVar("R", bound=WireMessage)
C = TypeVar("C", bound=ServiceConfig, covariant=True, default=ServiceConfig)

AT_ONCE_IN_A_ROW = 32
"""Requests answered without letting anything else run: some milliseconds of a planner's."""


class ServiceRuntime(Generic[C]):
    """One process' surroundings, as a context. Everything it starts ends when the context is left.

    With a `bus` given (tests, simulation) that bus is used and left open; without, it connects to `config.nats_url`.
    `http_address` is ``host:port`` of the health pages, None with `serve_http=False`.
    """

    def __init__(
        self,
        name: str,
        config: C,
        *,
        bus: Bus | None = None,
        instance: str | None = None,
        incarnation: Incarnation | None = None,
        serve_http: bool = True,
        tracing: Tracing | None = None,
    ) -> None:
        self.name = name
        self._config = config
        self.instance = instance or f"{socket.gethostname()}-{os.getpid()}"
        self.incarnation = incarnation or new_incarnation()
        self.metrics = Metrics()
        self.log: FilteringBoundLogger = structlog.get_logger()
        self.stopping = asyncio.Event()
        self.http_address: str | None = None
        self.tracing: Tracing = tracing or NullTracing()
        """Unless given, opened on entry by `config.otlp_endpoint`."""
        self._opens_tracing = tracing is None
        self._bus = bus
        self._serve_http = serve_http
        self._state = ProcessState.STARTING
        self._state_changed = asyncio.Event()
        self._readiness: dict[str, Callable[[], str | None]] = {"bus": self._bus_problem}
        self._micro = MicroService(
            name=f"isthmus-{name}",
            id=self.incarnation,
            version=isthmus_shared.__version__,
            started=datetime.now(UTC),
            description=f"Isthmus {name}",
            metadata={"instance": self.instance},
        )
        self._stack = AsyncExitStack()
        self._background: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if self._serve_http:  # first, so that it is seen to live while it waits for the bus
                self.http_address = (await stack.enter_async_context(self._health_server())).address
            if self._bus is None:
                name, login = f"{self._micro.name} {self.instance}", self.config.bus_login
                bus = await NatsBus.connect(self.config.nats_url, name=name, login=login)
                self._bus = await stack.enter_async_context(bus)
            if self.config.wire_version == PREVIOUS:
                self._bus = PreviousVersionBus(self._bus)
            if self._opens_tracing:
                endpoint = self.config.otlp_endpoint if self.config.TRACES else None
                self.tracing = open_tracing(endpoint, service=self.name, instance=self.instance, log=self.log)
            if self._opens_tracing and self.tracing.enabled:
                stack.push_async_callback(asyncio.to_thread, self.tracing.close)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            self._background = [tasks.create_task(self._micro.run(self._bus), name="micro")]
            self._stack = stack.pop_all()
        self.metrics.process_info.labels(self.name, self.instance, self.incarnation).set(1)
        self.log.info("service.started", http_address=self.http_address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._background:
            task.cancel()
        await self._stack.__aexit__(kind, error, trace)

    @property
    def config(self) -> C:
        return self._config

    @property
    def bus(self) -> Bus:
        assert self._bus is not None, "enter the runtime as a context first"
        return self._bus

    @property
    def state(self) -> ProcessState:
        return self._state

    def set_state(self, state: ProcessState) -> None:
        """Heartbeats tell at once, and /ready follows."""
        if state is self._state:
            return
        self._state = state
        self.log.info("service.state", state=state.value)
        changed, self._state_changed = self._state_changed, asyncio.Event()
        changed.set()

    def add_readiness(self, name: str, problem: Callable[[], str | None]) -> None:
        """One more condition of /ready: a function that says what is wrong now, or None."""
        self._readiness[name] = problem

    def problems(self) -> dict[str, str]:
        """Why this process is not ready; empty when it is."""
        found = {name: text for name, check in self._readiness.items() if (text := check()) is not None}
        if self._state is not ProcessState.READY:
            found["state"] = self._state.value
        return found

    async def wait_bus_ready(self) -> None:
        await self.bus.wait_connected()

    # -- loops of the services ---------------------------------------------------------------------------------------

    async def serve(
        self,
        subject: str,
        request_type: type[M],
        handler: Callable[[M], Awaitable[R]],
        *,
        on_error: Callable[[Fault], R],
        queue: str | None = None,
        name: str | None = None,
        max_pending: int = 4096,
        concurrency: int = 256,
        listening: asyncio.Event | None = None,
        at_once: Callable[[M], R | None] | None = None,
    ) -> None:
        """Answer requests on `subject` until cancelled, at most `concurrency` at once, over any outage of the bus.

        An `IsthmusError`, from decoding too, is answered as `on_error(fault)`. Any other exception is a bug of the
        handler's: it is logged with its traceback, answered as `internal_error`, and the service goes on.
        `listening` is set once requests can arrive. `name` labels metrics and NATS' service statistics. `at_once` is
        asked before `handler` and answers what needs no waiting, which spares it a task; it returns None for the rest.
        """
        slots = asyncio.Semaphore(concurrency)
        async with AsyncExitStack() as stack:
            endpoint = stack.enter_context(self._micro.serving(name or request_type.KIND, subject, queue))
            served = _Served(endpoint, request_type, handler, on_error)
            subscription = await stack.enter_async_context(
                subscribed(self.bus, subject, queue=queue, max_pending=max_pending)
            )
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            if listening is not None:
                listening.set()
            in_a_row = 0
            async for message in subscription:
                if at_once is not None and await self._answer_at_once(served, at_once, message):
                    in_a_row += 1
                    if in_a_row >= AT_ONCE_IN_A_ROW:
                        in_a_row = 0
                        await asyncio.sleep(0)
                    continue
                await slots.acquire()
                tasks.create_task(self._answer(served, message)).add_done_callback(lambda _: slots.release())
                self._count_dropped(endpoint.name, subscription.dropped)

    def serving(self, name: str, subject: str, queue: str | None = None) -> AbstractContextManager[Endpoint]:
        """Show a subject that the service answers by itself in NATS' service statistics; `record` what happens."""
        return self._micro.serving(name, subject, queue)

    async def watch(
        self,
        subject: str,
        message_type: type[M],
        handler: Callable[[M], Awaitable[None]],
        *,
        name: str | None = None,
        max_pending: int = 4096,
        listening: asyncio.Event | None = None,
    ) -> None:
        """Hand on what is published on `subject`, one after the other, until cancelled.

        A malformed message, or one that the handler refuses with an `IsthmusError`, is counted and logged. Any other
        exception ends the watch: nobody waits for an answer that could tell of it.
        """
        label = name or message_type.KIND
        async with subscribed(self.bus, subject, max_pending=max_pending) as subscription:
            if listening is not None:
                listening.set()
            async for message in subscription:
                self._count_dropped(label, subscription.dropped)
                try:
                    await handler(message_type.decode(message.data))
                except IsthmusError as error:
                    self.metrics.bus_malformed.labels(label).inc()
                    self.log.warning("bus.message_refused", subject=message.subject, code=error.code, why=error.text)

    async def heartbeat(self, subject: str, make: Callable[[], WireMessage]) -> None:
        """Publish `make()` now, on every change of state, and every `heartbeat_interval_s`, until cancelled."""
        while True:
            changed = self._state_changed
            try:
                await self.bus.publish(subject, make().encode())
            except BusDisconnected:
                await self.bus.wait_connected()
                continue
            except PayloadTooLarge as error:  # the bus is back with a lower limit; this process is well all the same
                self.log.error("heartbeat.too_large", error=error.text)
            else:
                self.metrics.heartbeats.inc()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.heartbeat_interval_s):
                    await changed.wait()

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _answer(self, served: _Served[M, R], message: BusMessage) -> None:
        started_s = asyncio.get_running_loop().time()
        parent = checked(message.headers.get(HEADER)) if self.tracing.enabled else ""
        span = self.tracing.begin(served.endpoint.name, parent) if parent else NULL_SPAN
        incoming.set(parent)
        result, error = await self._result(served, message)
        await self._finish(served, message, span, started_s, result, error)

    async def _answer_at_once(
        self, served: _Served[M, R], at_once: Callable[[M], R | None], message: BusMessage
    ) -> bool:
        """False: it takes the long way, be it that it must wait or that it makes no sense."""
        started_s = asyncio.get_running_loop().time()
        parent = checked(message.headers.get(HEADER)) if self.tracing.enabled else ""
        try:
            request = served.request_type.decode(message.data)
        except IsthmusError:
            return False
        error: IsthmusError | None = None
        incoming.set(parent)
        span = self.tracing.begin(served.endpoint.name, parent) if parent else NULL_SPAN
        try:
            result = at_once(request)
            if result is None:
                return False
        except IsthmusError as refusal:
            result, error = served.on_error(refusal.to_fault()), refusal
        except Exception as bug:
            self.log.exception("service.handler_failed", endpoint=served.endpoint.name, subject=message.subject)
            result, error = self._bug(served, bug)
        fault = getattr(result, "fault", None)
        if isinstance(fault, Fault):
            error = fault.to_error()
        await self._finish(served, message, span, started_s, result, error)
        return True

    async def _finish(
        self,
        served: _Served[M, R],
        message: BusMessage,
        span: Span,
        started_s: float,
        result: R,
        error: IsthmusError | None,
    ) -> None:
        if message.reply is not None and is_inbox(message.reply):
            try:
                await self._reply(served, message.reply, result)
            except IsthmusError as failure:
                error = failure
                self.log.warning("bus.reply_failed", endpoint=served.endpoint.name, code=error.code, why=error.text)
        span.end(error=error.code if error else "")
        took_s = asyncio.get_running_loop().time() - started_s
        served.endpoint.record(took_s, error)
        self.metrics.bus_calls.labels(served.endpoint.name, error.code if error else "ok").inc()
        self.metrics.bus_call_seconds.labels(served.endpoint.name).observe(took_s)

    async def _result(self, served: _Served[M, R], message: BusMessage) -> tuple[R, IsthmusError | None]:
        try:
            request = served.request_type.decode(message.data)
        except IsthmusError as error:
            self.metrics.bus_malformed.labels(served.endpoint.name).inc()
            self.log.warning("bus.message_refused", subject=message.subject, code=error.code, why=error.text)
            return served.on_error(error.to_fault()), error
        try:
            result = await served.handler(request)
        except IsthmusError as error:
            return served.on_error(error.to_fault()), error
        except Exception as bug:
            self.log.exception("service.handler_failed", endpoint=served.endpoint.name, subject=message.subject)
            return self._bug(served, bug)
        fault = getattr(result, "fault", None)
        return result, fault.to_error() if isinstance(fault, Fault) else None

    def _bug(self, served: _Served[M, R], bug: Exception) -> tuple[R, IsthmusError]:
        internal = IsthmusError(f"{self.name} failed on this request", why=f"{type(bug).__name__}: {bug}")
        return served.on_error(internal.to_fault()), internal

    async def _reply(self, served: _Served[M, R], reply: str, result: R) -> None:
        try:
            await self.bus.publish(reply, result.encode())
        except PayloadTooLarge as error:
            await self.bus.publish(reply, served.on_error(error.to_fault()).encode())
            raise

    def _count_dropped(self, label: str, dropped: int) -> None:
        if dropped:
            self.metrics.bus_dropped.labels(label).set(dropped)

    def _health_server(self) -> HealthServer:
        pages = {"/health": self._health, "/live": self._live, "/ready": self._ready, "/metrics": self._metrics_page}
        return HealthServer(pages, host=self.config.http_host, port=self.config.http_port)

    def _identity(self) -> dict[str, Any]:
        return {
            "service": self.name,
            "instance": self.instance,
            "incarnation": self.incarnation,
            "version": isthmus_shared.__version__,
            "state": self._state.value,
        }

    def _health(self) -> Page:
        return Page.json(200, {**self._identity(), "bus_connected": self._bus_connected, "problems": self.problems()})

    def _live(self) -> Page:
        return Page.json(200, {"live": True})

    def _ready(self) -> Page:
        problems = self.problems()
        return Page.json(503 if problems else 200, {"ready": not problems, "problems": problems})

    def _metrics_page(self) -> Page:
        self.metrics.bus_connected.set(self._bus_connected)
        for state in ProcessState:
            self.metrics.process_state.labels(state.value).set(state is self._state)
        return Page(200, CONTENT_TYPE, self.metrics.exposition())

    @property
    def _bus_connected(self) -> bool:
        return self._bus is not None and self._bus.connected

    def _bus_problem(self) -> str | None:
        return None if self._bus_connected else "the bus is out of reach"


@dataclass(frozen=True, slots=True)
class _Served(Generic[M, R]):
    endpoint: Endpoint
    request_type: type[M]
    handler: Callable[[M], Awaitable[R]]
    on_error: Callable[[Fault], R]
