"""From a scenario to the arrays that the loop works on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from isthmus_planner.sim.exact import BINS
from isthmus_planner.sim.hardware import Interleave, Node, Role
from isthmus_planner.sim.scenario import Scenario
from isthmus_planner.sim.workload import Bursty, ClosedLoop, FromTrace, Lengths, Poisson, Stream
from isthmus_planner.sim.world import (
    AGGREGATED,
    BURSTY,
    CHANGE,
    CLOSED,
    DECODE,
    LANE,
    METRICS,
    NEVER,
    NODE,
    NONE,
    POISSON,
    PREFILL,
    SHARED,
    SLOT,
    STREAM,
    TRACE,
    Records,
    World,
    records,
)

ROLES = {Role.PREFILL: PREFILL, Role.DECODE: DECODE, Role.AGGREGATED: AGGREGATED}
NO_LIMIT = 2**62
"""Of tokens: more than any memory holds."""
TRACE_BLOCK_TOKENS = 512
"""Of the Mooncake trace's `hash_ids`."""


def build(scenario: Scenario) -> World:
    """All arrays, with every stream's first event in the queue."""
    nodes, streams, models = scenario.nodes, scenario.streams, _numbered_models(scenario)
    most_batch = max((node.decode.max_batch for node in nodes if node.decode is not None), default=1)
    slots = sum(stream.in_flight_limit for stream in streams)
    sources = len(streams) + len(nodes) + len(nodes) ** 2 + 1
    maps = [_map_size(node.prefix_cache_blocks) for node in nodes]
    cached = sum(node.prefix_cache_blocks for node in nodes)
    world = World(
        shared=_shared(scenario),
        nodes=records(NODE, len(nodes)),
        slots=records(SLOT, slots),
        lanes=records(LANE, len(nodes) ** 2),
        streams=records(STREAM, len(streams)),
        changes=_changes(scenario),
        a_s=np.array([a for node in nodes for a in (node.decode.a_s if node.decode else ())] or [0.0]),
        quantiles=np.array([q for stream in streams for q in _tables(stream)], np.int64),
        ring=np.zeros(max(1, sum(s.arrivals.clients for s in streams if isinstance(s.arrivals, ClosedLoop)))),
        finish=np.zeros((len(nodes), most_batch), np.int64),
        finish_slot=np.zeros((len(nodes), most_batch), np.int64),
        by_stream=np.zeros((len(nodes), len(streams), 2), np.int64),
        heap_at=np.zeros(sources),
        heap_source=np.zeros(sources, np.int64),
        heap_place=np.full(sources, NONE, np.int64),
        counts=np.zeros((len(streams), METRICS, BINS), np.int64),
        sums=np.zeros((len(streams), METRICS, 2)),
        trace_at=np.zeros(0),
        trace_isl=np.zeros(0, np.int64),
        trace_osl=np.zeros(0, np.int64),
        trace_block_end=np.zeros(0, np.int64),
        trace_blocks=np.zeros(0, np.int64),
        cache_hash=np.zeros(max(1, cached), np.int64),
        cache_older=np.zeros(max(1, cached), np.int64),
        cache_newer=np.zeros(max(1, cached), np.int64),
        cache_map=np.zeros(max(1, sum(maps)), np.int64),
    )
    world.slots.next = np.arange(1, slots + 1)
    world.slots[slots - 1].next = NONE
    for name in ("head", "tail", "slot"):
        world.lanes[name] = NONE
    world.lanes.level = scenario.relay.chunk_bytes * scenario.relay.burst_chunks
    _fill_nodes(world, scenario, models, maps)
    _fill_streams(world, scenario, models)
    return world


def _numbered_models(scenario: Scenario) -> dict[str, int]:
    return {name: number for number, name in enumerate(sorted({node.model for node in scenario.nodes}))}


def _map_size(blocks: int) -> int:
    """A power of two, at most half full."""
    return 0 if blocks == 0 else 1 << (2 * blocks - 1).bit_length()


def _tables(stream: Stream) -> tuple[int, ...]:
    return stream.isl_tokens.quantiles + stream.osl_tokens.quantiles


def _shared(scenario: Scenario) -> Records:
    shared, relay = records(SHARED, 1), scenario.relay
    row = shared[0]
    row.setup, row.chunk, row.pace = relay.setup_s, relay.chunk_bytes, relay.pace_bytes_per_s
    row.burst = relay.chunk_bytes * relay.burst_chunks
    row.lane_rate = relay.lane_bytes_per_s
    row.window_bytes = math.inf if relay.work_requests is None else relay.work_requests * relay.chunk_bytes
    row.seed = scenario.seed
    row.trace_over = 0 if any(isinstance(stream.arrivals, FromTrace) for stream in scenario.streams) else 1
    row.trace_block_tokens = TRACE_BLOCK_TOKENS
    return shared


def _changes(scenario: Scenario) -> Records:
    names = [node.name for node in scenario.nodes]
    ordered = sorted(enumerate(scenario.role_changes), key=lambda pair: (pair[1].at_s, pair[0]))
    changes = records(CHANGE, len(ordered) + 1)
    for row, (_, change) in zip(changes, ordered, strict=False):
        row.node, row.role, row.at = names.index(change.node), ROLES[change.role], change.at_s
    changes[len(ordered)].at = NEVER
    return changes


def _fill_nodes(world: World, scenario: Scenario, models: dict[str, int], maps: list[int]) -> None:
    offset = cache = map_base = 0
    for node, row, map_size in zip(scenario.nodes, world.nodes, maps, strict=True):
        for name in ("queue_head", "queue_tail", "landed_head", "landed_tail", "room_head", "room_tail"):
            row[name] = NONE
        row.fresh_head = row.cache_newest = row.cache_oldest = NONE
        row.model, row.role, row.next_role = models[node.model], ROLES[node.role], ROLES[node.role]
        row.kv_capacity, row.pass_tokens = node.kv_capacity_tokens, node.pass_tokens
        row.staging_capacity = NO_LIMIT if node.staging_tokens is None else node.staging_tokens
        row.prefill_first = node.interleave is Interleave.PREFILL_FIRST
        row.link, row.kv_bytes, row.speed = node.link_bytes_per_s, node.kv_bytes_per_token, 1.0
        row.cache_blocks, row.cache_base = node.prefix_cache_blocks, cache
        row.map_base, row.map_mask = map_base, map_size - 1
        if node.prefill is not None:
            law = node.prefill
            row.p_base, row.p_token, row.p_pair = law.base_s, law.token_s, law.pair_s
            row.p_floor, row.p_extra = law.floor_s, law.extra_token_s
        if node.decode is not None:
            row.max_batch, row.a_offset, row.b = node.decode.max_batch, offset, node.decode.b_s_per_token
            offset += node.decode.max_batch
        _fill_mechanisms(row, node, scenario)
        cache += node.prefix_cache_blocks
        map_base += map_size


def _fill_mechanisms(row: Any, node: Node, scenario: Scenario) -> None:
    on = scenario.mechanisms
    row.posting_rate = math.inf
    if node.transfer_stall is not None and on.transfer_stall:
        row.stall, row.stall_token = node.transfer_stall.stall_s, node.transfer_stall.stall_s_per_token
    if node.descriptor_posting is not None and on.descriptor_posting:
        posting = node.descriptor_posting
        row.share_per_rate = posting.share_per_byte_per_s
        if posting.post_s > 0:
            row.posting_rate = posting.bytes_per_descriptor * posting.ranks / posting.post_s
    if node.resident_kv is not None and on.resident_kv:
        row.c, row.over = node.resident_kv.s_per_token, node.resident_kv.above_tokens
        row.receive_pair = node.resident_kv.receive_s_per_pair
    if node.nic_queue is not None and on.nic_queue_overflow:
        queue = node.nic_queue
        row.queue_depth, row.queue_retry = queue.depth, queue.retry_s
        row.queue_descriptor_bytes = queue.bytes_per_descriptor
    if on.aggregated_interference:
        row.interference = node.interference


def _fill_streams(world: World, scenario: Scenario, models: dict[str, int]) -> None:
    offset = ring = 0
    for stream, row in zip(scenario.streams, world.streams, strict=True):
        row.model, row.requests, row.warmup = models[stream.model], stream.requests, stream.warmup_requests
        row.isl_offset, row.isl_count = _place(stream.isl_tokens, offset)
        row.osl_offset, row.osl_count = _place(stream.osl_tokens, row.isl_offset + row.isl_count)
        offset = row.osl_offset + row.osl_count
        row.limit, row.overhead, row.burst, row.time_scale = stream.in_flight_limit, stream.overhead_s, 1, 1.0
        row.next_made = NEVER
        if stream.prefix_hits is not None:
            row.hit_probability, row.hit_fraction = stream.prefix_hits.probability, stream.prefix_hits.fraction
        match stream.arrivals:
            case ClosedLoop(clients, rate):
                row.kind, row.rate, row.clients, row.free = CLOSED, rate, clients, clients
                row.ring_base = ring
                ring += clients
            case Poisson(rate):
                row.kind, row.rate = POISSON, rate
            case Bursty(rate, burst):
                row.kind, row.rate, row.burst = BURSTY, rate, burst
            case FromTrace(scale):
                row.kind, row.time_scale = TRACE, scale


def _place(lengths: Lengths, offset: int) -> tuple[int, int]:
    return offset, len(lengths.quantiles)
