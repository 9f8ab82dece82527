"""What ingresses route by while no planner answers: every pair that can serve a model, with its share. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from isthmus_planner.cost.online import LiveCosts
from isthmus_planner.cost.speeds import Pending, Side, crossing_s, predict
from isthmus_planner.registry import ref_of
from isthmus_planner.route import ModePolicy, Policy, why_no_pair
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.health import ProcessState, Role, WorkerHeartbeat
from isthmus_shared.messages.route import ModelPlan, PlannedPair, RoutePlan

PLAN_EVERY_S = 2.0
"""Workers come and go more slowly; who dies in between is left out by the ingress, which hears of it itself."""
MAX_PAIRS = 256
"""Of a model: some 100 kB a message. In larger clusters each decode worker is in fewer pairs, none in no pair."""


def route_plan(
    workers: Sequence[WorkerHeartbeat],
    learned: Mapping[Incarnation, LiveCosts],
    policy: Policy,
    *,
    planner: Incarnation,
    valid_s: float,
) -> RoutePlan:
    ready = [worker for worker in workers if worker.state is ProcessState.READY and worker.model]
    models = sorted({worker.model for worker in ready})
    plans = []
    for model in models:
        pairs = [
            _planned(prefill, decode, learned, policy)
            for prefill, decode in _pairs([worker for worker in ready if worker.model == model], policy)
        ]
        if pairs:
            plans.append(ModelPlan(model=model, pairs=tuple(pairs)))
    return RoutePlan(planner=planner, valid_s=valid_s, models=tuple(plans))


def _pairs(workers: list[WorkerHeartbeat], policy: Policy) -> Iterator[tuple[WorkerHeartbeat | None, WorkerHeartbeat]]:
    """At most `MAX_PAIRS`, each prefill worker with the next of the decode workers in turn."""
    decoders = [worker for worker in workers if Role.DECODE in worker.roles]
    prefillers = [worker for worker in workers if Role.PREFILL in worker.roles]
    found = 0
    if policy.mode is not ModePolicy.AGGREGATED:
        for shift in range(len(prefillers)):
            for number, decode in enumerate(decoders):
                prefill = prefillers[(number + shift) % len(prefillers)]
                if found < MAX_PAIRS and why_no_pair(prefill, decode) is None:
                    found += 1
                    yield prefill, decode
    if not found:
        for decode in decoders[:MAX_PAIRS]:
            yield None, decode


def _planned(
    prefill: WorkerHeartbeat | None, decode: WorkerHeartbeat, learned: Mapping[Incarnation, LiveCosts], policy: Policy
) -> PlannedPair:
    """Its share is what it would give in a second: one prompt's tokens over the time of both phases, empty."""
    first, second = (_side(worker, learned) for worker in (prefill or decode, decode))
    context = min(first.worker.max_model_len_tokens, second.worker.max_model_len_tokens)
    predicted = predict(first, second, context, policy.constants)
    return PlannedPair(
        prefill=None if prefill is None else ref_of(prefill),
        decode=ref_of(decode),
        weight=1.0 / (predicted.ttft_p50_s + context * predicted.itl_p50_s),
        max_context_tokens=context,
        deadlines=policy.deadlines.for_prediction(predicted, crossing_s(context, policy.constants)),
        predicted=predicted,
    )


def _side(worker: WorkerHeartbeat, learned: Mapping[Incarnation, LiveCosts]) -> Side:
    idle = worker.load.model_copy(update={"running": 0, "waiting": 0, "loading": 0, "queued_prefill_tokens": 0})
    return Side(worker.model_copy(update={"load": idle}), Pending(), learned.get(worker.incarnation))
