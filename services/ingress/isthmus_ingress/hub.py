"""Where everything that workers publish comes in: tokens for the sagas, heartbeats, deaths."""

from __future__ import annotations

import asyncio

from structlog.typing import FilteringBoundLogger

from isthmus_ingress.driver import RunningSaga
from isthmus_ingress.last_plan import LastPlan
from isthmus_ingress.outcomes import OutcomeLog, outcome_of
from isthmus_ingress.recent import RecentLatencies
from isthmus_ingress.roster import Roster
from isthmus_ingress.saga_types import BusBack, Event, MoveWanted, WorkerGone
from isthmus_ingress.step_reader import StepReader
from isthmus_shared.bus.port import Bus, Subscription
from isthmus_shared.errors import ProtocolViolation
from isthmus_shared.ids import RequestId
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import LEFT, WorkerHeartbeat, WorkerLost
from isthmus_shared.messages.route import RoutePlan
from isthmus_shared.messages.work import MoveRequests
from isthmus_shared.metrics import Metrics

MAX_PENDING_EVENTS = 16384
"""Step messages not yet read. At one per worker and step that is seconds of a large cluster; a shed one is a gap
that its sagas see, and re-plan."""
MAX_MOVES = 8
"""Sequences of one ingress that are paused and copied at the same time."""
GOODBYE_S = 0.25
"""A worker that leaves in order has said all it had to say, but on other subjects, which its goodbye may overtake."""
WATCH_S = 0.25
"""Between two looks for silent workers: half a heartbeat."""


class Hub:
    """One per ingress. `run` serves until cancelled; sagas are added and removed as they live."""

    def __init__(
        self, bus: Bus, events_subject: str, roster: Roster, metrics: Metrics, log: FilteringBoundLogger
    ) -> None:
        self.roster = roster
        self.recent = RecentLatencies()
        self.outcomes = OutcomeLog()
        self.last_plan = LastPlan()
        self.ready = asyncio.Event()
        """Set once everything is subscribed."""
        self.knows_model = asyncio.Event()
        """Set once a worker that is ready was heard."""
        self._bus, self._subject, self._metrics, self.log = bus, events_subject, metrics, log
        self._sagas: dict[RequestId, RunningSaga] = {}
        self._now_s = asyncio.get_running_loop().time

    @property
    def running(self) -> int:
        return len(self._sagas)

    @property
    def sagas(self) -> tuple[RunningSaga, ...]:
        return tuple(self._sagas.values())

    def add(self, saga: RunningSaga) -> None:
        self._sagas[saga.work.request_id] = saga

    def remove(self, saga: RunningSaga) -> None:
        """It has ended."""
        self._sagas.pop(saga.work.request_id, None)
        self.outcomes.add(outcome_of(saga, asyncio.get_running_loop().time()))

    async def run(self) -> None:
        async with (
            self._bus.subscribe(self._subject, max_pending=MAX_PENDING_EVENTS) as events,
            self._bus.subscribe(subjects.HEARTBEAT_WORKER) as beats,
            self._bus.subscribe(subjects.WORKER_LOST) as lost,
            self._bus.subscribe(subjects.MOVE_REQUESTS) as moves,
            self._bus.subscribe(subjects.PLAN) as plans,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._read_events(events))
            tasks.create_task(self._read_beats(beats))
            tasks.create_task(self._read_lost(lost))
            tasks.create_task(self._read_moves(moves))
            tasks.create_task(self._read_plans(plans))
            tasks.create_task(self._watch())
            self.ready.set()

    async def _read_events(self, events: Subscription) -> None:
        steps = StepReader(self._sagas, self._now_s, self._malformed, self.log)
        async for message in events:
            steps.take((message, *events.take_waiting()))

    async def _read_beats(self, beats: Subscription) -> None:
        loop = asyncio.get_running_loop()
        async for message in beats:
            try:
                beat = WorkerHeartbeat.decode(message.data)
            except ProtocolViolation as error:
                self._malformed(message.subject, error)
                continue
            news = self.roster.beat(beat, now_s=loop.time())
            if isinstance(news, WorkerGone):
                self.tell_gone(news)
            elif news is not None:
                self.log.info("worker.back", worker=beat.worker_id, worker_incarnation=news.incarnation)
                self._tell(news)
            if not self.knows_model.is_set() and self.roster.models:
                self.knows_model.set()

    async def _read_lost(self, lost: Subscription) -> None:
        loop = asyncio.get_running_loop()
        async for message in lost:
            try:
                report = WorkerLost.decode(message.data)
            except ProtocolViolation as error:
                self._malformed(message.subject, error)
                continue
            if report.silent:
                self.roster.called_silent(report.worker.incarnation)
            else:
                self.roster.lost(report.worker.incarnation)
            why = f"{report.worker.worker_id}: {report.why}"
            gone = WorkerGone(report.worker.incarnation, why, certain=not report.silent)
            if report.why == LEFT:
                loop.call_later(GOODBYE_S, self.tell_gone, gone)
            else:
                self.tell_gone(gone)

    async def _read_moves(self, moves: Subscription) -> None:
        async for message in moves:
            try:
                asked = MoveRequests.decode(message.data)
            except ProtocolViolation as error:
                self._malformed(message.subject, error)
                continue
            try:
                await self._move_all(asked)
            except Exception:  # as above
                self.log.exception("message.broke", subject=message.subject)

    async def _move_all(self, asked: MoveRequests) -> None:
        """A few sequences at a time, the longest last: those may have ended by then, and cost the most."""
        life = asked.worker.incarnation
        beat = self.roster.worker(life)
        if beat is None or beat.relay is None:
            return  # gone, or without a way to give anything away: its sequences finish there or are re-planned
        wanted = MoveWanted(life, beat.relay, beat.model_fingerprint, beat.kv_form)
        sagas = sorted((each for each in self.sagas if each.saga.decodes_on(life)), key=lambda each: each.known_tokens)
        self.log.info("requests.moving", worker=asked.worker.worker_id, count=len(sagas), why=asked.why)
        at_once = asyncio.Semaphore(MAX_MOVES)

        async def move(saga: RunningSaga) -> None:
            async with at_once:
                await saga.move(wanted)

        async with asyncio.TaskGroup() as tasks:
            for saga in sagas:
                tasks.create_task(move(saga))

    async def _read_plans(self, plans: Subscription) -> None:
        loop = asyncio.get_running_loop()
        async for message in plans:
            try:
                self.last_plan.take(RoutePlan.decode(message.data), now_s=loop.time())
            except ProtocolViolation as error:
                self._malformed(message.subject, error)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        looked_s = loop.time()
        outages = self._bus.outages
        while True:
            await asyncio.sleep(WATCH_S)
            now_s = loop.time()
            if self._bus.outages != outages and self._bus.connected:
                outages = self._bus.outages
                self.roster.excuse(now_s=now_s)
                self._tell(BusBack())
            if not self._bus.connected or now_s - looked_s > 2 * WATCH_S:
                # Without the bus, or when this process itself was held up, silence is ours and not theirs.
                self.roster.excuse(now_s=now_s)
            looked_s = now_s
            for gone in self.roster.silent(now_s=now_s):
                self.tell_gone(gone)

    def tell_gone(self, gone: WorkerGone) -> None:
        self.log.warning("worker.gone", worker_incarnation=gone.incarnation, why=gone.why, certain=gone.certain)
        self.last_plan.gone(gone.incarnation)
        self._tell(gone)

    def _tell(self, event: Event) -> None:
        for saga in list(self._sagas.values()):
            saga.feed(event)

    def _malformed(self, subject: str, error: ProtocolViolation) -> None:
        self._metrics.bus_malformed.labels("ingress").inc()
        self.log.warning("message.malformed", subject=subject, error=error.text)
