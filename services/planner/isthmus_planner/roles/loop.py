"""The leader's loop over roles and rates: what it sees, decides and sends, once a second. Everything that it decides by
is in the pure modules beside it; every replica measures the mix, only the leader acts."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from isthmus_planner.cost.online import StepCosts
from isthmus_planner.estimates import Estimates
from isthmus_planner.leader.port import Leadership
from isthmus_planner.registry import Registry
from isthmus_planner.roles.balance import BalancePolicy, Balancer, Change, Verdict
from isthmus_planner.roles.capacity import Ability
from isthmus_planner.roles.mix import Mix, MixMeter
from isthmus_planner.roles.models import Allocator, ModelChange, ModelPolicy, ModelPool
from isthmus_planner.roles.rates import Receiver, Sender, lane_rates
from isthmus_planner.roles.workers import abilities, pools
from isthmus_shared.config import ServiceConfig
from isthmus_shared.errors import BusDisconnected, IsthmusError, PayloadTooLarge
from isthmus_shared.ids import Incarnation, WorkerId
from isthmus_shared.messages import subjects
from isthmus_shared.messages.assign import AssignRoles
from isthmus_shared.messages.health import PlannerHeartbeat, ProcessState, RelayRates, Role, WorkerHeartbeat
from isthmus_shared.messages.outcomes import Outcomes
from isthmus_shared.messages.route import RouteRequest
from isthmus_shared.messages.work import Ack
from isthmus_shared.runtime import ServiceRuntime

LOOK_S = 1.0
"""Two heartbeats: nothing that is decided by is newer."""
WARM_S = 3.0
"""From this process' start until it decides anything: by then it has heard everyone several times."""
ASK_S = 1.0
"""For a worker's answer; an assignment is asked again until the heartbeat shows it."""
RATES_VALID_S = 10.0
"""Lanes are free again so long after the last word of a leader: the next one speaks within three seconds."""
PLANNER_LOST_S = 3.0
"""A replica that is silent for so long answers no routes."""


@dataclass(frozen=True, slots=True)
class RoleSettings:
    balance: bool = True
    """Whether roles are assigned at all."""
    itl_s: float | None = None
    """Target between tokens where requests promise none."""
    policy: BalancePolicy = field(default_factory=BalancePolicy)
    models: ModelPolicy = field(default_factory=ModelPolicy)


@dataclass(frozen=True, slots=True)
class Pool:
    """One model's workers and work at one moment."""

    model: str
    beats: tuple[WorkerHeartbeat, ...]
    workers: tuple[Ability, ...]
    mix: Mix | None
    itl_s: float | None


class RoleLoop:
    def __init__(
        self,
        runtime: ServiceRuntime[ServiceConfig],
        registry: Registry,
        estimates: Estimates,
        leadership: Leadership,
        settings: RoleSettings,
        prior: StepCosts,
    ) -> None:
        self._runtime, self._registry, self._estimates = runtime, registry, estimates
        self._leadership, self._settings, self._prior = leadership, settings, prior
        self._meter = MixMeter()
        self._balancers: dict[str, Balancer] = {}
        self._allocator = Allocator(settings.models)
        self._planners: dict[Incarnation, float] = {}

    def routed(self, request: RouteRequest, *, cached_tokens: int = 0) -> None:
        """A request asks this replica for a route. One that asks again, or after a lost worker, is known already."""
        if request.waited_s > 0 or request.exclude:
            return
        self._meter.arrived(
            request.request_id,
            request.model,
            isl_tokens=request.isl_tokens,
            max_osl_tokens=request.max_osl_tokens,
            cached_tokens=cached_tokens,
            itl_s=None if request.slo is None else request.slo.itl_s,
            now_s=_now_s(),
        )

    async def run(self) -> None:
        """Until cancelled."""
        rt = self._runtime
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(rt.watch(subjects.OUTCOMES, Outcomes, self._on_outcomes, name="outcomes_of_roles"))
            tasks.create_task(
                rt.watch(subjects.HEARTBEAT_PLANNER, PlannerHeartbeat, self._on_planner, name="planners_of_roles")
            )
            await asyncio.sleep(WARM_S)
            while True:
                await self._look()
                await asyncio.sleep(LOOK_S)

    async def _on_outcomes(self, message: Outcomes) -> None:
        for outcome in message.outcomes:
            if outcome.finish in ("stop", "length"):
                self._meter.ended(outcome.request_id, outcome.osl_tokens)

    async def _on_planner(self, beat: PlannerHeartbeat) -> None:
        self._planners[beat.incarnation] = _now_s()

    async def _look(self) -> None:
        if self._leadership.epoch is None:
            self._allocator.forget_pending()
            for balancer in self._balancers.values():
                balancer.forget_pending()
            return
        found = self._pools()
        if self._settings.balance:
            moving = self._allocated(found)
            changes = [change for pool in found if (change := self._balanced(pool)) is not None]
            async with asyncio.TaskGroup() as tasks:
                for change in changes:
                    tasks.create_task(self._assign(change.worker_id, change.incarnation, tuple(sorted(change.roles))))
                if moving is not None and self._can_take(moving):
                    tasks.create_task(self._assign(moving.worker_id, moving.incarnation, moving.roles, moving.model))
        await self._publish_rates(found)

    def _pools(self) -> list[Pool]:
        now_s, learned = _now_s(), self._estimates.steady()
        replicas = max(1, sum(now_s - at_s < PLANNER_LOST_S for at_s in self._planners.values()))
        self._planners = {life: at_s for life, at_s in self._planners.items() if now_s - at_s < PLANNER_LOST_S}
        found = []
        for model, beats in sorted(pools(self._registry.workers).items()):
            mix = self._meter.mix(model, now_s)
            if mix is not None:  # replicas get equal shares of the routes, and each hears of its own alone
                mix = Mix(mix.rate_per_s * replicas, mix.kinds, mix.itl_s)
            itl_s = self._settings.itl_s if mix is None or mix.itl_s is None else mix.itl_s
            found.append(Pool(model, beats, abilities(beats, learned, self._prior), mix, itl_s))
        return found

    # -- roles

    def _balanced(self, pool: Pool) -> Change | None:
        balancer = self._balancers.setdefault(pool.model, Balancer(self._settings.policy))
        was = balancer.pending
        change = balancer.look(pool.workers, pool.mix, pool.itl_s, _now_s())
        for verdict in balancer.take_verdicts():
            self._tell(pool.model, verdict)
        if change is not None and change is not was:
            self._runtime.log.info(
                "role.assigned",
                model=pool.model,
                worker=change.worker_id,
                roles=sorted(change.roles),
                why=change.why.value,
                before_per_s=round(change.before_per_s, 4),
                after_per_s=round(change.after_per_s, 4),
            )
        return change

    def _tell(self, model: str, verdict: Verdict) -> None:
        change = verdict.change
        to = "+".join(sorted(change.roles))
        self._runtime.metrics.role_changes.labels(model, to, verdict.outcome.replace(" ", "_")).inc()
        self._runtime.log.info(
            "role.change_over",
            model=model,
            worker=change.worker_id,
            outcome=verdict.outcome,
            predicted_per_s=round(change.after_per_s, 4),
            realised_per_s=None if verdict.realised_per_s is None else round(verdict.realised_per_s, 4),
        )

    async def _assign(
        self, worker_id: WorkerId, life: Incarnation, roles: tuple[Role, ...], model: str | None = None
    ) -> None:
        """Asks; what did not arrive or was refused is asked again with the next look, as long as it is wanted."""
        epoch = self._leadership.epoch
        if epoch is None:
            return
        message = AssignRoles(epoch=epoch, incarnation=life, roles=roles, model=model)
        log = self._runtime.log.bind(worker=worker_id)
        try:
            reply = await self._runtime.bus.request(
                subjects.worker_assign(worker_id), message.encode(), timeout_s=ASK_S
            )
            fault = Ack.decode(reply.data).fault
        except IsthmusError as error:
            log.warning("role.not_told", code=error.code, why=error.text)
            return
        if fault is not None:
            log.warning("role.refused", code=fault.code, why=fault.what)

    # -- models

    def _can_take(self, change: ModelChange) -> bool:
        """Not while it drains or loads: then it has taken it, and is not asked again."""
        return any(
            beat.incarnation == change.incarnation and beat.model == change.was and beat.state is ProcessState.READY
            for beat in self._registry.workers
        )

    def _allocated(self, found: list[Pool]) -> ModelChange | None:
        """What to ask of a worker that is to load another model. While it does, it is in no pool's balance."""
        allocator = self._allocator
        was, beats = allocator.pending, self._registry.workers
        loadable = {beat.worker_id: frozenset(beat.models_able or (beat.model,)) for beat in beats}
        pools = [ModelPool(pool.model, pool.workers, pool.mix, pool.itl_s) for pool in found]
        change = allocator.look(pools, loadable, _now_s())
        for verdict, outcome in allocator.take_verdicts():
            self._runtime.metrics.model_changes.labels(verdict.model, outcome.replace(" ", "_")).inc()
            self._runtime.log.info("model.change_over", worker=verdict.worker_id, model=verdict.model, outcome=outcome)
        if change is not None and change is not was:
            self._runtime.log.info(
                "model.assigned",
                worker=change.worker_id,
                model=change.model,
                before=change.was,
                roles=change.roles,
                load=round(change.before, 3),
                predicted=round(change.after, 3),
            )
        if change is not None:
            found[:] = [_without(pool, change.worker_id) for pool in found]
        return change

    # -- rates

    async def _publish_rates(self, found: list[Pool]) -> None:
        senders, receivers = _lanes(found, self._host_costs())
        epoch = self._leadership.epoch
        lanes = lane_rates(senders, receivers)
        if not lanes or epoch is None:
            return
        rates = RelayRates(lanes=lanes, epoch=epoch, valid_s=RATES_VALID_S)
        with contextlib.suppress(BusDisconnected, PayloadTooLarge):  # the lanes' own feedback holds meanwhile
            await self._runtime.bus.publish(subjects.RELAY_RATES, rates.encode())

    def _host_costs(self) -> dict[Incarnation, float | None]:
        return {beat.incarnation: beat.host_s_per_byte for beat in self._registry.relays}


def _without(pool: Pool, worker_id: WorkerId) -> Pool:
    kept = [pair for pair in zip(pool.beats, pool.workers, strict=True) if pair[1].worker_id != worker_id]
    beats, workers = tuple(beat for beat, _ in kept), tuple(worker for _, worker in kept)
    return Pool(pool.model, beats, workers, pool.mix, pool.itl_s)


def _lanes(found: list[Pool], host_costs: dict[Incarnation, float | None]) -> tuple[list[Sender], list[Receiver]]:
    """Nodes that send and receive. Of several workers on one node the one that can bear the least counts."""
    senders: dict[Incarnation, Sender] = {}
    receivers: dict[Incarnation, Receiver] = {}
    for pool in found:
        for beat, worker in zip(pool.beats, pool.workers, strict=True):
            if beat.relay is None:
                continue
            relay, node = beat.relay.incarnation, beat.node_id
            if Role.PREFILL in beat.roles:
                weight = 1.0 / max(worker.costs.per_prefill_token_s, 1e-9)
                before = senders.get(relay)
                senders[relay] = Sender(node, relay, weight + (0.0 if before is None else before.weight))
            if Role.DECODE in beat.roles and pool.itl_s is not None:
                load = beat.load
                held = (load.kv_blocks_total - load.kv_blocks_free) * beat.kv_block_tokens
                step_s = worker.costs.step_s(load.running + load.loading, held)
                known = receivers.get(relay)
                if known is None or step_s / pool.itl_s > known.step_s / known.itl_s:
                    receivers[relay] = Receiver(node, relay, step_s, pool.itl_s, host_costs.get(relay))
    return list(senders.values()), list(receivers.values())


def _now_s() -> float:
    return asyncio.get_running_loop().time()
