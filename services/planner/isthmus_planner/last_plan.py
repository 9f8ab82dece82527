"""What ingresses route by while no planner answers: every pair that can serve a model, with its share. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from isthmus_planner.cost.online import LiveCosts
from isthmus_planner.cost.speeds import crossing_s
from isthmus_planner.registry import ref_of
from isthmus_planner.routing.filters import decodes, prefills, why_no_pair
from isthmus_planner.routing.policy import ModePolicy, Policy
from isthmus_planner.routing.seat import Seat, seat_of
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.health import ProcessState, WorkerHeartbeat
from isthmus_shared.messages.route import ModelPlan, PlannedPair, Prediction, RoutePlan

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
    ready = [
        _idle_seat(worker, learned.get(worker.incarnation), policy)
        for worker in workers
        if worker.state is ProcessState.READY and worker.model
    ]
    plans = []
    for model in sorted({seat.beat.model for seat in ready}):
        seats = [seat for seat in ready if seat.beat.model == model]
        pairs = [_planned(prefill, decode, policy) for prefill, decode in _pairs(seats, policy)]
        if pairs:
            plans.append(ModelPlan(model=model, pairs=tuple(pairs)))
    return RoutePlan(planner=planner, valid_s=valid_s, models=tuple(plans))


def _pairs(seats: list[Seat], policy: Policy) -> Iterator[tuple[Seat | None, Seat]]:
    """At most `MAX_PAIRS`, each prefill worker with the next of the decode workers in turn."""
    decoders = [seat for seat in seats if decodes(seat)]
    prefillers = [seat for seat in seats if prefills(seat)]
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


def _planned(prefill: Seat | None, decode: Seat, policy: Policy) -> PlannedPair:
    """Its share is what it would give in a second: a longest prompt's tokens over the time of both phases, empty."""
    first = prefill or decode
    context = min(first.beat.max_model_len_tokens, decode.beat.max_model_len_tokens)
    ttft_s, itl_s = first.wait_s(0.0) + first.prefill_s(context), decode.itl_with_s(context)
    predicted = Prediction(
        ttft_p50_s=ttft_s,
        ttft_p90_s=ttft_s * first.prefill_spread,
        itl_p50_s=itl_s,
        itl_p90_s=itl_s * decode.decode_spread,
        calibrated=first.prefill_told and decode.decode_told,
    )
    return PlannedPair(
        prefill=None if prefill is None else ref_of(prefill.beat),
        decode=ref_of(decode.beat),
        weight=1.0 / (ttft_s + context * itl_s),
        max_context_tokens=context,
        deadlines=policy.deadlines.for_prediction(predicted, crossing_s(context, policy.constants)),
        predicted=predicted,
    )


def _idle_seat(worker: WorkerHeartbeat, live: LiveCosts | None, policy: Policy) -> Seat:
    idle = worker.load.model_copy(update={"running": 0, "waiting": 0, "loading": 0, "queued_prefill_tokens": 0})
    return seat_of(worker.model_copy(update={"load": idle}), policy.constants, live=live)
