"""From the arrays of a finished simulation to its result."""

from __future__ import annotations

import math

import numpy as np

from isthmus_planner.sim.exact import BINS, bin_start
from isthmus_planner.sim.hardware import Role
from isthmus_planner.sim.result import NodeResult, Quantiles, Result, StreamResult, Waits
from isthmus_planner.sim.scenario import Scenario
from isthmus_planner.sim.world import E2EL, ITL, TPOT, TTFT, World

QUEUEING_SHARE = 0.05
"""Of the end-to-end latency: below it a queue is no bottleneck."""
FULL_SHARE = 0.9
"""Of memory or seats, from which on they are what an aggregated node's queue waits for."""


def collect(scenario: Scenario, world: World) -> Result:
    last_s = float(max(stream.last_done for stream in world.streams))
    streams = tuple(_stream(world, index, stream.name) for index, stream in enumerate(scenario.streams))
    nodes = tuple(_node(world, index, node.name, last_s) for index, node in enumerate(scenario.nodes))
    return Result(last_s, int(world.shared[0].events), streams, nodes, _bottleneck(scenario, streams, nodes))


def _quantiles(world: World, stream: int, metric: int) -> Quantiles:
    counts = world.counts[stream, metric]
    cumulated = np.cumsum(counts)
    total = int(cumulated[-1])
    if total == 0:
        return Quantiles(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    most = float(world.sums[stream, metric, 1])

    def at(share: float) -> float:
        """Linear within the bin."""
        wanted = share * total
        index = int(np.searchsorted(cumulated, wanted))
        before = int(cumulated[index - 1]) if index else 0
        low = bin_start(index) if index else 0.0
        high = bin_start(index + 1) if index + 1 < BINS else most
        return min(most, low + (high - low) * (wanted - before) / int(counts[index]))

    mean = float(world.sums[stream, metric, 0]) / total
    return Quantiles(total, mean, at(0.5), at(0.9), at(0.95), at(0.99), most)


def _per_s(amount: float, seconds: float) -> float:
    return float(amount) / float(seconds) if seconds > 0 else 0.0


def _stream(world: World, index: int, name: str) -> StreamResult:
    row = world.streams[index]
    whole_s, steady_s = row.last_done - row.begun_at, row.last_sent - row.begun_at
    measured = max(1, int(row.measured))
    sums = ("overhead", "queue", "prefill", "room", "transfer", "seat", "decode")
    return StreamResult(
        name=name,
        sent=int(row.sent),
        completed=int(row.completed),
        refused=int(row.refused),
        measured=int(row.measured),
        ttft_s=_quantiles(world, index, TTFT),
        itl_s=_quantiles(world, index, ITL),
        tpot_s=_quantiles(world, index, TPOT),
        e2el_s=_quantiles(world, index, E2EL),
        requests_per_s=_per_s(row.counted, whole_s),
        output_tokens_per_s=_per_s(row.counted_osl, whole_s),
        total_tokens_per_s=_per_s(row.counted_isl + row.counted_osl, whole_s),
        steady_requests_per_s=_per_s(row.steady, steady_s),
        steady_output_tokens_per_s=_per_s(row.steady_osl, steady_s),
        steady_total_tokens_per_s=_per_s(row.steady_isl + row.steady_osl, steady_s),
        waits=Waits(*(float(row["sum_" + name]) / measured for name in sums)),
    )


def _node(world: World, index: int, name: str, last_s: float) -> NodeResult:
    row = world.nodes[index]
    return NodeResult(
        name=name,
        role=tuple(role.value for role in Role)[int(row.role)],
        prefill_busy=_per_s(row.prefill_busy, last_s),
        decode_busy=_per_s(row.decode_busy, last_s),
        mean_batch=_per_s(row.batch_integral, row.decode_busy),
        mean_step_s=_per_s(row.decode_busy, row.steps),
        kv_peak_tokens=int(row.kv_peak),
        kv_mean_share=_per_s(row.kv_integral, last_s * row.kv_capacity),
        staging_peak_tokens=int(row.staging_peak),
        prefilled_requests=int(row.prefilled_requests),
        prefilled_tokens=int(row.prefilled_tokens),
        decoded_tokens=int(row.decoded_tokens),
        sent_bytes=float(row.sent),
        received_bytes=float(row.received),
        nic_overflows=int(row.overflows),
        prefix_hit_share=_per_s(row.hit_tokens, row.asked_tokens),
    )


def _bottleneck(scenario: Scenario, streams: tuple[StreamResult, ...], nodes: tuple[NodeResult, ...]) -> str:
    """Where requests wait longest; if nowhere for long, where they are served longest."""
    weights = [stream.measured for stream in streams]

    def total(field: str) -> float:
        waits = [float(getattr(stream.waits, field)) for stream in streams]
        return math.fsum(weight * wait for weight, wait in zip(weights, waits, strict=True))

    queues = {
        _queue_cause(scenario, nodes): total("prefill_queue_s"),
        "kv_memory": total("kv_room_s"),
        "transfer": total("transfer_s"),
        "decode_seats": total("seat_s"),
    }
    served = {"prefill_time": total("prefill_s"), "decode_time": total("decode_s")}
    longest = max(queues, key=lambda name: queues[name])
    if queues[longest] > QUEUEING_SHARE * (sum(queues.values()) + sum(served.values())):
        return longest
    return max(served, key=lambda name: served[name])


def _queue_cause(scenario: Scenario, nodes: tuple[NodeResult, ...]) -> str:
    """What the queue before prefill waits for: an aggregated node's memory or seats may be full."""
    for node, found in zip(scenario.nodes, nodes, strict=True):
        if node.role is Role.AGGREGATED and node.decode is not None:
            if found.kv_mean_share > FULL_SHARE:
                return "kv_memory"
            if found.mean_batch > FULL_SHARE * node.decode.max_batch:
                return "decode_seats"
    return "prefill"
