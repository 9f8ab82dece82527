"""The choice of a route: filters, then scorers, then the picker. All pure.

Filters say who may serve the request and, of those who may not, why. Scorers predict what each feasible plan costs.
The picker takes the cheapest, and of equals the least loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from isthmus_planner.cost.online import LiveCosts
from isthmus_planner.cost.speeds import CostConstants, Pending, Side, crossing_s, predict, queue_wait_s
from isthmus_planner.deadlines import DeadlinePolicy
from isthmus_planner.registry import ref_of
from isthmus_shared.errors import ContextTooLong, IsthmusError, ModelNotFound, Unavailable
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.health import ProcessState, Role, WorkerHeartbeat
from isthmus_shared.messages.route import Mode, Prediction, Route, RouteRequest

RETRY_STARTING_S = 1.0
"""Two heartbeats: by then a worker that was about to be ready is."""
RETRY_GONE_S = 5.0
"""Somebody must start a worker first."""
KV_WAIT_S = 1.0
"""Added to a plan whose decode worker has no room for the prompt now: it waits until a sequence there ends."""
ITL_WEIGHT_TOKENS = 16.0
"""In `auto`, so many tokens' latency weighs as much as the time to the first one."""


class ModePolicy(StrEnum):
    DISAGGREGATED = "disaggregated"
    """Wherever a pair is feasible; aggregated otherwise."""
    AGGREGATED = "aggregated"
    AUTO = "auto"
    """Whichever is predicted to be cheaper."""


@dataclass(frozen=True, slots=True)
class Policy:
    mode: ModePolicy = ModePolicy.DISAGGREGATED
    constants: CostConstants = field(default_factory=CostConstants)
    deadlines: DeadlinePolicy = field(default_factory=DeadlinePolicy)


@dataclass(frozen=True, slots=True)
class Plan:
    prefill: WorkerHeartbeat | None
    """None: aggregated."""
    decode: WorkerHeartbeat
    predicted: Prediction
    waits_s: float
    """Beyond prefill: room for KV on the decode side."""
    staged: bool = False
    """`decode` fetches the KV that is there already; nobody prefills."""

    @property
    def load(self) -> int:
        """Sequences on both sides; breaks ties."""
        sides = [self.decode] if self.prefill is None else [self.prefill, self.decode]
        return sum(side.load.running + side.load.waiting + side.load.loading for side in sides)


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the planner knows at the moment of asking."""

    workers: tuple[WorkerHeartbeat, ...]
    pending: Mapping[Incarnation, Pending]
    models: frozenset[str]
    """Every model name seen, its workers alive or not."""
    warm: bool
    """False in a planner so young that it may not have heard everyone yet."""
    learned: Mapping[Incarnation, LiveCosts] = field(default_factory=dict)
    """What the workers' steps cost, of those that have told."""
    relays: frozenset[Incarnation] = frozenset()
    """The lives of those that are alive."""

    def side(self, worker: WorkerHeartbeat) -> Side:
        life = worker.incarnation
        return Side(worker, self.pending.get(life, Pending()), self.learned.get(life))


def choose(request: RouteRequest, cluster: Cluster, policy: Policy, planner: Incarnation) -> tuple[Route, Plan]:
    """The route and what it was chosen for; raises the typed refusal when there is none."""
    removed: Counter[str] = Counter()
    able = list(_able(request, cluster, removed))
    plans = (
        list(_resuming(request, able, cluster, policy))
        or list(_plans(request, able, cluster, policy, removed))
        or list(_last_resort(request, cluster, policy))
    )
    if not plans:
        raise _refusal(request, cluster, removed)
    best = min(plans, key=lambda plan: _rank(plan, policy, cluster.pending))
    prefill = None if best.prefill is None else ref_of(best.prefill)
    route = Route(
        mode=Mode.AGGREGATED if prefill is None and not best.staged else Mode.DISAGGREGATED,
        prefill=prefill,
        decode=ref_of(best.decode),
        deadlines=policy.deadlines.for_prediction(best.predicted, crossing_s(request.isl_tokens, policy.constants)),
        predicted=best.predicted,
        planner=planner,
    )
    return route, best


def assignments(request: RouteRequest, plan: Plan) -> Iterator[tuple[Incarnation, Pending]]:
    """What the plan adds to each side until its next beat shows it."""
    blocks = blocks_for(request.isl_tokens, plan.decode.kv_block_tokens)
    if plan.prefill is None:
        there = request.staged.tokens if plan.staged and request.staged is not None else 0
        tokens = max(0, request.isl_tokens - there)
        yield plan.decode.incarnation, Pending(prefill_tokens=tokens, sequences=1, kv_blocks=blocks)
        return
    yield plan.prefill.incarnation, Pending(prefill_tokens=request.isl_tokens, sequences=1)
    yield plan.decode.incarnation, Pending(sequences=1, kv_blocks=blocks)


def blocks_for(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)


def _able(request: RouteRequest, cluster: Cluster, removed: Counter[str]) -> Iterator[WorkerHeartbeat]:
    """Workers that could take some part in the request."""
    for worker in cluster.workers:
        reason = why_unable(worker, request)
        if reason is None:
            yield worker
        else:
            removed[reason] += 1


def why_unable(worker: WorkerHeartbeat, request: RouteRequest) -> str | None:
    """The first filter that takes this worker out, in words; None if none does."""
    if worker.model != request.model:
        return "serves another model"
    if worker.state is not ProcessState.READY:
        return f"is {worker.state.value}"
    if worker.incarnation in request.exclude:
        return "has just failed this request"
    if request.isl_tokens >= worker.max_model_len_tokens:
        return f"has a context of {worker.max_model_len_tokens} tokens"
    if blocks_for(request.isl_tokens + 1, worker.kv_block_tokens) > worker.load.kv_blocks_total:
        return "has too small a KV cache"
    return None


def why_no_pair(prefill: WorkerHeartbeat, decode: WorkerHeartbeat) -> str | None:
    """What keeps these two from exchanging KV; None if nothing does."""
    if prefill.worker_id == decode.worker_id:
        return "is the same worker"
    if prefill.model_fingerprint != decode.model_fingerprint:
        return "has other weights than its peer"
    if prefill.kv_form != decode.kv_form:
        return "has another KV form than its peer"
    if prefill.relay is None or decode.relay is None:
        return "has no relay"
    return None


def _plans(
    request: RouteRequest, able: list[WorkerHeartbeat], cluster: Cluster, policy: Policy, removed: Counter[str]
) -> Iterator[Plan]:
    decoders = [worker for worker in able if Role.DECODE in worker.roles]
    prefillers = [worker for worker in able if Role.PREFILL in worker.roles]
    found = False
    if policy.mode is not ModePolicy.AGGREGATED:
        for prefill in prefillers:
            for decode in decoders:
                reason = why_no_pair(prefill, decode)
                if reason is None:
                    found = True
                    yield _plan(request, prefill, decode, cluster, policy)
                else:
                    removed[reason] += 1
    if found and policy.mode is ModePolicy.DISAGGREGATED:
        return
    if not decoders and able:
        removed["has no decode role"] += len(able)
    for decode in decoders:
        yield _plan(request, None, decode, cluster, policy)


def _resuming(request: RouteRequest, able: list[WorkerHeartbeat], cluster: Cluster, policy: Policy) -> Iterator[Plan]:
    """Decode workers that can fetch the KV that is staged, and have only the tokens after it to compute."""
    staged = request.staged
    if staged is None or staged.relay.incarnation not in cluster.relays:
        return
    for decode in able:
        same = (decode.model_fingerprint, decode.kv_form) == (staged.model_fingerprint, staged.kv_form)
        if same and Role.DECODE in decode.roles and decode.relay is not None:
            rest = request.model_copy(update={"isl_tokens": max(1, request.isl_tokens - staged.tokens)})
            plan = _plan(rest, None, decode, cluster, policy)
            free = decode.load.kv_blocks_free - cluster.side(decode).pending.kv_blocks
            short = blocks_for(request.isl_tokens + 1, decode.kv_block_tokens) > free
            yield replace(plan, staged=True, waits_s=KV_WAIT_S if short else 0.0)


def _last_resort(request: RouteRequest, cluster: Cluster, policy: Policy) -> Iterator[Plan]:
    """When nobody else is left: decode workers that failed the request as one of a pair may still serve it alone.

    What failed was most often the way between the two. If it was the worker, it answers with that at once.
    """
    if not request.exclude:
        return
    anew = request.model_copy(update={"exclude": ()})
    for worker in cluster.workers:
        if Role.DECODE in worker.roles and why_unable(worker, anew) is None:
            yield _plan(request, None, worker, cluster, policy)


def _plan(
    request: RouteRequest, prefill: WorkerHeartbeat | None, decode: WorkerHeartbeat, cluster: Cluster, policy: Policy
) -> Plan:
    first, second = cluster.side(prefill or decode), cluster.side(decode)
    free = decode.load.kv_blocks_free - second.pending.kv_blocks
    short = blocks_for(request.isl_tokens + 1, decode.kv_block_tokens) > free
    return Plan(
        prefill=prefill,
        decode=decode,
        predicted=predict(first, second, request.isl_tokens, policy.constants),
        waits_s=(KV_WAIT_S if short else 0.0) + _interference_s(prefill, second, policy.constants),
    )


def _interference_s(prefill: WorkerHeartbeat | None, decode: Side, constants: CostConstants) -> float:
    """Prompts queued on the decode worker hold up its steps, whoever prefills this one."""
    return 0.0 if prefill is None else queue_wait_s(decode, constants)


def _rank(plan: Plan, policy: Policy, pending: Mapping[Incarnation, Pending]) -> tuple[float, float, int, str, str]:
    """Cheapest first: predicted cost (to the tenth of a millisecond), then load, then names for a stable order."""
    cost_s = plan.predicted.ttft_p50_s + plan.waits_s
    itl_s = plan.predicted.itl_p50_s
    if policy.mode is ModePolicy.AUTO:
        cost_s += ITL_WEIGHT_TOKENS * itl_s
        if plan.prefill is None:  # the whole prefill stands in the way of everyone who decodes there
            cost_s += plan.predicted.ttft_p50_s * plan.decode.load.running
    sides = (plan.decode,) if plan.prefill is None else (plan.prefill, plan.decode)
    routed = sum(pending.get(side.incarnation, Pending()).sequences for side in sides)
    name = "" if plan.prefill is None else plan.prefill.worker_id
    return round(cost_s, 4), round(itl_s, 4), plan.load + routed, name, plan.decode.worker_id


def _refusal(request: RouteRequest, cluster: Cluster, removed: Counter[str]) -> IsthmusError:
    of_model = [worker for worker in cluster.workers if worker.model == request.model]
    if not of_model:
        return _refuse_model(request, cluster)
    longest = max(worker.max_model_len_tokens for worker in of_model)
    if request.isl_tokens >= longest:
        return ContextTooLong(
            f"the prompt has {request.isl_tokens} tokens",
            why=f"model {request.model!r} takes at most {longest} tokens, output included",
            todo="send a shorter prompt",
            param="prompt",
        )
    why = _in_words(removed)
    if any(worker.state is ProcessState.READY for worker in of_model):
        return Unavailable(  # not a matter of load: nobody who could take it is there
            f"no worker can take this request for model {request.model!r}",
            why=why,
            todo="try again, or start another worker",
            retry_after_s=RETRY_STARTING_S,
        )
    return Unavailable(
        f"no worker for model {request.model!r} is ready",
        why=why,
        todo="try again",
        retry_after_s=RETRY_STARTING_S,
    )


def _refuse_model(request: RouteRequest, cluster: Cluster) -> IsthmusError:
    if request.model in cluster.models:
        return Unavailable(
            f"no worker for model {request.model!r} is alive",
            todo="start one, or try again",
            retry_after_s=RETRY_GONE_S,
        )
    if not cluster.warm:
        return Unavailable("the planner has just started", todo="try again", retry_after_s=RETRY_STARTING_S)
    names = ", ".join(sorted(cluster.models)) or "none"
    return ModelNotFound(f"the model {request.model!r} does not exist", todo=f"known models: {names}", param="model")


def _in_words(removed: Mapping[str, int]) -> str:
    parts: Iterable[str] = (f"{count} x {reason}" for reason, count in sorted(removed.items()))
    return ", ".join(parts) or "no worker has the role"
