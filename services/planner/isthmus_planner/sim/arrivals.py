"""Requests come into being, are sent, and arrive."""

from __future__ import annotations

from isthmus_planner.sim.compiled import constant, inner
from isthmus_planner.sim.engine import client_free, schedule_stream, send_spawned, take_prompt
from isthmus_planner.sim.exact import ln, uniform
from isthmus_planner.sim.prefix_cache import remember_blocks
from isthmus_planner.sim.routing import route
from isthmus_planner.sim.world import BURSTY, CLOSED, NEVER, NONE, TRACE, World

GAP, ISL, OSL, HIT = constant(0), constant(1), constant(2), constant(3)
"""What a random number is used for."""
FIRST, NO_BLOCKS, NOT_CACHED = constant(0), constant(0), constant(0)


@inner
def gap_s(w: World, s: int, events: int) -> float:
    """Exponential; of a stream's so manieth event."""
    rate = w.streams[s].rate / w.streams[s].burst
    return float(-ln(uniform(w.shared[0].seed, s, events, GAP)) / rate)


@inner
def _draw(w: World, offset: int, count: int, s: int, number: int, use: int) -> int:
    """From a table of quantiles: linear between two of them, rounded so that both ends count in full."""
    if count == 1:
        return int(w.quantiles[offset])
    at = uniform(w.shared[0].seed, s, number, use) * (count - 1)
    part = int(at)
    low, high = w.quantiles[offset + part], w.quantiles[offset + part + 1]
    return int(low + (at - part) * (high - low + 1)) if high > low else int(low)


@inner
def stream_event(w: World, s: int, now: float) -> None:
    stream = w.streams[s]
    if stream.kind == CLOSED:
        if stream.next_made <= now:
            stream.made += 1
            stream.spawned += 1
            stream.next_made = now + gap_s(w, s, stream.made) if stream.made < stream.requests else NEVER
            send_spawned(w, s, now)
        else:
            sent_at = w.ring[stream.ring_base + stream.ring_head]
            stream.ring_head = (stream.ring_head + 1) % stream.clients
            stream.ring_count -= 1
            number = stream.arrived
            stream.arrived += 1
            _arrive(w, s, sent_at, number, now)
    elif stream.kind == TRACE:
        _arrive_from_trace(w, s, now)
    else:
        for _ in range(stream.burst if stream.kind == BURSTY else 1):
            if stream.made < stream.requests:
                number = stream.made
                stream.made += 1
                stream.sent += 1
                stream.last_sent = now - stream.overhead
                _arrive(w, s, now - stream.overhead, number, now)
        stream.next_made = now + gap_s(w, s, stream.made) if stream.made < stream.requests else NEVER
    schedule_stream(w, s)


@inner
def _arrive(w: World, s: int, sent_at: float, number: int, now: float) -> None:
    stream, seed = w.streams[s], w.shared[0].seed
    isl = _draw(w, stream.isl_offset, stream.isl_count, s, number, ISL)
    osl = _draw(w, stream.osl_offset, stream.osl_count, s, number, OSL)
    cached = NOT_CACHED
    if stream.hit_probability > 0.0 and uniform(seed, s, number, HIT) < stream.hit_probability:
        cached = int(stream.hit_fraction * isl)
    _enter(w, s, number, isl, osl, cached, NO_BLOCKS, NO_BLOCKS, sent_at, now)


@inner
def _arrive_from_trace(w: World, s: int, now: float) -> None:
    """The next record; `next_made` of the one after it is set, or NEVER if that has not been read yet."""
    stream, shared = w.streams[s], w.shared[0]
    i = shared.trace_next
    number = stream.made
    stream.made += 1
    stream.sent += 1
    stream.last_sent = now - stream.overhead
    begin = w.trace_block_end[i - 1] if i > 0 else NO_BLOCKS
    shared.trace_next = i + 1
    set_trace_time(w, s)
    if stream.made >= stream.requests:
        shared.trace_over = 1
        stream.next_made = NEVER
    isl, osl = w.trace_isl[i], w.trace_osl[i]
    _enter(w, s, number, isl, osl, NOT_CACHED, begin, w.trace_block_end[i], now - stream.overhead, now)


@inner
def set_trace_time(w: World, s: int) -> None:
    stream, shared = w.streams[s], w.shared[0]
    stream.next_made = NEVER
    if shared.trace_next < shared.trace_count:
        stream.next_made = w.trace_at[shared.trace_next] * stream.time_scale + stream.overhead


@inner
def _enter(
    w: World, s: int, number: int, isl: int, osl: int, cached: int, begin: int, end: int, sent_at: float, now: float
) -> None:
    """Admission, then the route."""
    stream, shared = w.streams[s], w.shared[0]
    slot = shared.free_slot
    if slot == NONE or (stream.kind != CLOSED and stream.in_flight >= stream.limit):
        _refuse(w, s, now)
        return
    request = w.slots[slot]
    following = request.next
    request.stream = s
    request.number = number
    request.isl = isl
    request.osl = osl
    request.sent_at = sent_at
    request.arrived_at = now
    request.started_at = NEVER
    request.taken = 0
    if not route(w, slot, cached, begin, end, now):
        _refuse(w, s, now)
        return
    shared.free_slot = following
    stream.in_flight += 1
    if end > begin:
        remember_blocks(w, request.prefill, begin, end)
    take_prompt(w, slot, now)


@inner
def _refuse(w: World, s: int, now: float) -> None:
    w.streams[s].refused += 1
    client_free(w, s, now)
