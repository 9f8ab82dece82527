"""The planner as a service: heartbeats in, routes and the view of the cluster out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from isthmus_planner.admission.control import MAX_LINE, Decision, Go, Refuse, Wait
from isthmus_planner.admission.holding import Holding
from isthmus_planner.config import LeaderPolicy, PlannerConfig
from isthmus_planner.cost.speeds import prior_costs
from isthmus_planner.desk import Desk
from isthmus_planner.explaining import answer_explanations
from isthmus_planner.forecasts import ForecastMetrics, forecasts
from isthmus_planner.last_plan import PLAN_EVERY_S, route_plan
from isthmus_planner.leader.bucket import JetStreamStore
from isthmus_planner.leader.keeper import LeaseKeeper
from isthmus_planner.leader.port import Leadership, SetLeader
from isthmus_planner.prefix.caches import PrefixCaches
from isthmus_planner.registry import Registry
from isthmus_planner.roles.loop import RoleLoop
from isthmus_planner.routing.explain import Explanations
from isthmus_planner.routing.refusing import Known
from isthmus_planner.routing.types import Choice
from isthmus_planner.routing.view import View
from isthmus_shared.errors import BusDisconnected, Fault, IsthmusError, PayloadTooLarge
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import (
    HEARTBEAT_INTERVAL_S,
    ClusterView,
    IngressHeartbeat,
    PlannerHeartbeat,
    ProcessState,
    RelayHeartbeat,
    RelayRates,
    Role,
    ViewRequest,
    WorkerHeartbeat,
    WorkerLost,
)
from isthmus_shared.messages.outcomes import Outcome, Outcomes
from isthmus_shared.messages.prefix import PrefixEvents
from isthmus_shared.messages.route import Queued, RouteReply, RouteRequest
from isthmus_shared.runtime import ServiceRuntime

SWEEP_S = 0.1
"""A fifth of a heartbeat: a silent death is found at most so much later than its bound."""
MAX_AT_ONCE = 1024
"""Asks for a route in work beside those that are held: each takes well under a millisecond."""
WARM_S = 3 * HEARTBEAT_INTERVAL_S
"""By then everyone alive has been heard, even if one beat was lost."""


class PlannerService:
    def __init__(self, runtime: ServiceRuntime[PlannerConfig]) -> None:
        self._runtime = runtime
        self._log = runtime.log.bind()  # whose level is settled: what is below it costs nothing
        self._policy = runtime.config.policy()
        self._registry = Registry()
        self._desk = Desk(self._policy, runtime.config.admission(), self._choose)
        self._holding = Holding(self._desk)
        self._forecasts = ForecastMetrics(runtime.metrics)
        self._seats, self._estimates = self._desk.seats, self._desk.estimates
        self._explanations = Explanations(runtime.incarnation)
        self._on_outcome: list[Callable[[Outcome, float], None]] = [
            self._desk.outcome,
            lambda outcome, _: self._explanations.outcome(outcome),
        ]
        self._started_s = self._now_s()
        self._keeper = self._lease_keeper()
        self.leadership: Leadership = self._keeper or SetLeader(self._sole_epoch)
        """Asked before anything is assigned."""
        self._roles = RoleLoop(
            runtime,
            self._registry,
            self._estimates,
            self.leadership,
            runtime.config.role_settings(),
            prior_costs(self._policy.constants),
        )
        self._routes = 0
        self._caches = PrefixCaches(runtime.bus, runtime.log, max_hashes=runtime.config.prefix_hashes)

    async def run(self) -> None:
        """Until the process is told to stop. Nothing is handed over: the next planner hears everyone within a beat."""
        rt = self._runtime
        listening = [asyncio.Event(), asyncio.Event()]
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(loop)
                for loop in (
                    rt.watch(subjects.HEARTBEAT_WORKER, WorkerHeartbeat, self._on_worker),
                    rt.watch(subjects.HEARTBEAT_RELAY, RelayHeartbeat, self._on_relay),
                    rt.watch(subjects.HEARTBEAT_INGRESS, IngressHeartbeat, self._on_ingress),
                    rt.watch(subjects.RELAY_RATES, RelayRates, self._on_rates),
                    rt.watch(subjects.WORKER_LOST, WorkerLost, self._on_lost),
                    rt.watch(subjects.PREFIX_EVENTS, PrefixEvents, self._caches.events),
                    self._caches.run(),
                    rt.serve(
                        subjects.ROUTE,
                        RouteRequest,
                        self.route,
                        on_error=_refuse,
                        queue=subjects.PLANNER_QUEUE,
                        listening=listening[0],
                        concurrency=MAX_LINE + MAX_AT_ONCE,
                        max_pending=MAX_LINE + MAX_AT_ONCE,
                        at_once=self.route_at_once,
                    ),
                    self._holding.run(lambda request, refuse: self._refused(request, refuse.error)),
                    rt.serve(
                        subjects.VIEW,
                        ViewRequest,
                        self._view,
                        on_error=self._no_view,
                        queue=subjects.PLANNER_QUEUE,
                        listening=listening[1],
                    ),
                    rt.heartbeat(subjects.HEARTBEAT_PLANNER, self._beat),
                    rt.watch(subjects.OUTCOMES, Outcomes, self._on_outcomes),
                    answer_explanations(rt, self._explanations),
                    rt.watch(subjects.HEARTBEAT_PLANNER, PlannerHeartbeat, self._on_planner),
                    self._sweep(),
                    self._publish_plans(),
                    *([] if self._keeper is None else [self._keeper.run()]),
                    self._roles.run(),
                )
            ]
            ready = tasks.create_task(self._ready_when(listening))
            await rt.stopping.wait()
            for loop in (*loops, ready):
                loop.cancel()

    async def route(self, request: RouteRequest) -> RouteReply:
        return self._answer(request, await self._holding.wait(request))

    def route_at_once(self, request: RouteRequest) -> RouteReply | None:
        """None: it has to wait in line."""
        if not request.waited_s:
            self._roles.routed(request)
        decision = self._holding.offer(request)
        return None if isinstance(decision, Wait) else self._answer(request, decision)

    def _answer(self, request: RouteRequest, decision: Decision) -> RouteReply:
        match decision:
            case Go():
                return self._routed(request, decision.choice)
            case Refuse():
                self._refused(request, decision.error)
                return RouteReply(fault=decision.error.to_fault())
        return RouteReply(queued=Queued(position=decision.position, wait_s=decision.wait_s))

    def _choose(self, request: RouteRequest, seats: View, now_s: float) -> Choice:
        return self._explanations.choose(request, seats, self._known, now_s, self._caches.index)

    def _refused(self, request: RouteRequest, error: IsthmusError) -> None:
        self._explanations.refused(request.request_id, error)
        self._runtime.metrics.routes.labels("none", error.code).inc()
        self._log.info("route.refused", request=request.request_id, code=error.code, why=error.text)

    def _routed(self, request: RouteRequest, choice: Choice) -> RouteReply:
        self._explanations.committed(request.request_id)
        metrics, route = self._runtime.metrics, choice.route
        self._routes += 1
        metrics.routes.labels(route.mode.value, "ok").inc()
        metrics.route_predicted_ttft_seconds.observe(route.predicted.ttft_p50_s)
        self._log.debug(
            "route.chosen",
            request=request.request_id,
            mode=route.mode.value,
            prefill=None if route.prefill is None else route.prefill.worker_id,
            decode=route.decode.worker_id,
            ttft_p50_s=route.predicted.ttft_p50_s,
        )
        return RouteReply(route=route)

    def _known(self) -> Known:
        warm = self._now_s() - self._started_s >= WARM_S
        return Known(models=frozenset(self._registry.models), warm=warm)

    async def _view(self, _request: ViewRequest) -> ClusterView:
        return ClusterView(
            planner=self._runtime.incarnation,
            workers=self._registry.workers,
            relays=self._registry.relays,
            ingresses=self._registry.ingresses,
            planners=self._registry.planners,
            forecasts=forecasts(self._desk, self._registry.workers),
        )

    def _no_view(self, _fault: Fault) -> ClusterView:
        """A view request that made no sense: the reply has no place for a fault, so it shows nothing."""
        return ClusterView(planner=self._runtime.incarnation)

    async def _on_worker(self, beat: WorkerHeartbeat) -> None:
        now_s = self._now_s()
        for lost in self._registry.worker_beat(beat, now_s):
            self._forget(lost, "restarted")
        if self._registry.lives(beat):  # not one that was sent before its end was told of
            if self._desk.beat(beat, now_s):
                self._tell_drift(beat)
            self._caches.beat(beat)

    def _tell_drift(self, beat: WorkerHeartbeat) -> None:
        life = beat.incarnation
        drifts, slowdown = self._desk.drift.is_drifting(life), round(self._desk.drift.slowdown(life), 2)
        tell = self._runtime.log.warning if drifts else self._runtime.log.info
        tell("worker.drifting" if drifts else "worker.steady", worker=beat.worker_id, slowdown=slowdown)

    async def _on_relay(self, beat: RelayHeartbeat) -> None:
        now_s = self._now_s()
        self._registry.relay_beat(beat, now_s)
        self._seats.relay(beat, now_s)

    async def _on_rates(self, rates: RelayRates) -> None:
        self._seats.rates(rates, self._now_s())

    async def _on_ingress(self, beat: IngressHeartbeat) -> None:
        self._registry.ingress_beat(beat, self._now_s())

    async def _on_outcomes(self, message: Outcomes) -> None:
        now_s = self._now_s()
        for outcome in message.outcomes:
            for take in self._on_outcome:
                take(outcome, now_s)

    async def _on_planner(self, beat: PlannerHeartbeat) -> None:
        self._registry.planner_beat(beat, self._now_s())

    async def _on_lost(self, message: WorkerLost) -> None:
        """Who is silent every planner judges by itself: this may be its own word, come back to it."""
        if message.silent:
            return
        if self._registry.worker_lost(message.worker, self._now_s()):
            self._forget(message, "reported")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            lost = self._registry.sweep(self._now_s(), deaf=not self._runtime.bus.connected)
            for each in lost:
                self._forget(each, "silent")
                # Then nobody could hear it, and the ingresses see it too.
                with contextlib.suppress(BusDisconnected, PayloadTooLarge):
                    await self._runtime.bus.publish(subjects.WORKER_LOST, each.encode())
            alive = [worker.incarnation for worker in self._registry.workers]
            self._desk.keep(alive)
            self._caches.keep(alive)
            self._seats.keep_relays(relay.relay.node_id for relay in self._registry.relays)
            self._count()

    async def _publish_plans(self) -> None:
        """For the time after this planner's death. A young one has not heard everyone: its plan would be the worse."""
        rt = self._runtime
        await asyncio.sleep(WARM_S)
        while True:
            workers, valid_s = self._registry.workers, rt.config.plan_valid_s
            plan = route_plan(workers, self._estimates.live(), self._policy, planner=rt.incarnation, valid_s=valid_s)
            with contextlib.suppress(BusDisconnected, PayloadTooLarge):
                await rt.bus.publish(subjects.PLAN, plan.encode())
            await asyncio.sleep(PLAN_EVERY_S)

    def _lease_keeper(self) -> LeaseKeeper | None:
        rt = self._runtime
        if rt.config.leader is not LeaderPolicy.LEASE:
            return None
        store = JetStreamStore(rt.bus, replicas=rt.config.lease_replicas)
        return LeaseKeeper(store, rt.incarnation, rt.log, heard_epoch=lambda: self._registry.highest_epoch)

    def _sole_epoch(self) -> int | None:
        """Above any that was heard, once everyone has been heard."""
        if self._runtime.config.leader is LeaderPolicy.NEVER or self._now_s() - self._started_s < WARM_S:
            return None
        return max(1, self._registry.highest_epoch)

    def _forget(self, lost: WorkerLost, cause: str) -> None:
        self._seats.lost(lost.worker.incarnation)
        self._runtime.metrics.workers_lost.labels(cause).inc()
        self._runtime.log.warning("worker.lost", worker=lost.worker.worker_id, cause=cause, why=lost.why)

    def _count(self) -> None:
        self._runtime.metrics.planner_prefix_hashes.set(len(self._caches.index))
        counts = {(role, state): 0 for role in Role for state in ProcessState}
        for worker in self._registry.workers:
            for role in worker.roles:
                counts[role, worker.state] += 1
        self._forecasts.show(self._desk, self._registry.workers)
        for (role, state), count in counts.items():
            self._runtime.metrics.workers.labels(role.value, state.value).set(count)

    async def _ready_when(self, listening: list[asyncio.Event]) -> None:
        for event in listening:
            await event.wait()
        self._runtime.set_state(ProcessState.READY)

    def _beat(self) -> PlannerHeartbeat:
        rt, epoch = self._runtime, self.leadership.epoch
        return PlannerHeartbeat(
            incarnation=rt.incarnation,
            state=rt.state,
            interval_s=rt.config.heartbeat_interval_s,
            http_address=rt.http_address,
            leader=epoch is not None,
            epoch=epoch or 0,
            leader_problem="" if self._keeper is None else self._keeper.problem[:512],
            routes_total=self._routes,
        )

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def _refuse(fault: Fault) -> RouteReply:
    return RouteReply(fault=fault)


async def serve(runtime: ServiceRuntime[PlannerConfig]) -> None:
    await PlannerService(runtime).run()
