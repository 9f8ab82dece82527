"""Histograms and sums; nothing here decides anything."""

from __future__ import annotations

import math

from isthmus_planner.sim.compiled import inner
from isthmus_planner.sim.decode_run import steps_below, steps_s
from isthmus_planner.sim.exact import bin_of, bin_start
from isthmus_planner.sim.world import E2EL, ITL, NONE, ONCE, TPOT, TTFT, World


@inner
def count(w: World, stream: int, metric: int, value: float, weight: int) -> None:
    w.counts[stream, metric, bin_of(value)] += weight
    w.sums[stream, metric, 0] += value * weight
    w.sums[stream, metric, 1] = max(w.sums[stream, metric, 1], value)


@inner
def count_series(w: World, stream: int, first: float, slope: float, begin: float, end: float, weight: int) -> None:
    """Gaps of `first + i · slope` for whole i from `begin` to below `end`, each `weight` times."""
    if end <= begin:
        return
    steps = end - begin
    mean = first + slope * (begin + 0.5 * (steps - 1.0))
    w.sums[stream, ITL, 0] += mean * steps * weight
    w.sums[stream, ITL, 1] = max(w.sums[stream, ITL, 1], first + slope * (end - 1.0))
    i = begin
    while i < end:
        index = bin_of(first + slope * i)
        until = end
        if slope > 0.0 and bin_of(first + slope * (end - 1.0)) != index:
            until = min(end, max(i + 1.0, math.ceil((bin_start(index + 1) - first) / slope)))
        w.counts[stream, ITL, index] += int(until - i) * weight
        i = until


@inner
def count_fresh(w: World, n: int, step_end: float) -> None:
    """The first gap of those whose first step on this node has ended: it holds their transfer."""
    node = w.nodes[n]
    slot = node.fresh_head
    while slot != NONE:
        request = w.slots[slot]
        if request.number >= w.streams[request.stream].warmup:
            count(w, request.stream, ITL, step_end - request.first_at, ONCE)
        w.by_stream[n, request.stream, 1] -= 1
        slot = request.fresh_next
    node.fresh_head = NONE


@inner
def count_steps(w: World, n: int, until: float) -> None:
    """The gaps of a run's steps from those that are counted to `until`, all done at the speed that holds now."""
    node = w.nodes[n]
    counted = node.run_counted
    if until <= counted:
        return
    a, b, c, over, batch = w.a_s[node.a_offset + node.running - 1], node.b, node.c, node.over, float(node.running)
    tokens, slower = node.tokens, 1.0 / node.speed
    first_end = node.run_at + (steps_s(counted + 1.0, a, b, c, over, batch, tokens) - node.run_work) * slower
    below = until
    if c > 0.0:
        below = min(until, steps_below(tokens, batch, over))
    for stream in range(len(w.streams)):
        running = w.by_stream[n, stream, 0]
        if running == 0 or w.streams[stream].completed < w.streams[stream].warmup:
            continue
        going = running - w.by_stream[n, stream, 1]
        if going > 0:
            count(w, stream, ITL, first_end - node.step_end, going)
        first, slope = a + b * tokens, b * batch
        count_series(w, stream, first * slower, slope * slower, counted + 1.0, below, running)
        if below < until:
            first, slope = first + c * (tokens - over), slope + c * batch
            count_series(w, stream, first * slower, slope * slower, max(counted + 1.0, below), until, running)
    count_fresh(w, n, first_end)
    node.step_end = node.run_at + (steps_s(until, a, b, c, over, batch, tokens) - node.run_work) * slower
    node.run_counted = until


@inner
def count_step(w: World, n: int, now: float) -> None:
    """The gaps of one step beside which prompts were computed."""
    node = w.nodes[n]
    for stream in range(len(w.streams)):
        going = w.by_stream[n, stream, 0] - w.by_stream[n, stream, 1]
        if going > 0 and w.streams[stream].completed >= w.streams[stream].warmup:
            count(w, stream, ITL, now - node.step_end, going)
    count_fresh(w, n, now)


@inner
def count_request(w: World, slot: int, now: float) -> None:
    """One has ended."""
    request = w.slots[slot]
    stream = w.streams[request.stream]
    if stream.completed >= stream.warmup:
        stream.counted += 1
        stream.counted_isl += request.isl
        stream.counted_osl += request.osl
        if stream.sent < stream.requests:
            stream.steady += 1
            stream.steady_isl += request.isl
            stream.steady_osl += request.osl
    stream.completed += 1
    if stream.completed == stream.warmup:
        stream.begun_at = now
    stream.last_done = now
    if request.number < stream.warmup:
        return
    stream.measured += 1
    count(w, request.stream, TTFT, request.first_at - request.sent_at, ONCE)
    count(w, request.stream, E2EL, now - request.sent_at, ONCE)
    if request.osl > 1:
        count(w, request.stream, TPOT, (now - request.first_at) / (request.osl - 1), ONCE)
    stream.sum_overhead += request.arrived_at - request.sent_at
    stream.sum_queue += request.started_at - request.arrived_at
    stream.sum_prefill += request.first_at - request.started_at
    stream.sum_room += request.granted_at - request.first_at
    stream.sum_transfer += request.landed_at - request.granted_at
    stream.sum_seat += request.seated_at - request.landed_at
    stream.sum_decode += now - request.seated_at


@inner
def hold_kv(w: World, n: int, tokens: int, now: float) -> None:
    """Take (or, below 0, give back) KV memory."""
    node = w.nodes[n]
    node.kv_integral += node.kv_used * (now - node.kv_at)
    node.kv_at = now
    node.kv_used += tokens
    node.kv_peak = max(node.kv_peak, node.kv_used)
