"""The loop: the earliest event of all sources, again and again."""

from __future__ import annotations

from isthmus_planner.sim.arrivals import FIRST, gap_s, set_trace_time, stream_event
from isthmus_planner.sim.compiled import compiled, inner
from isthmus_planner.sim.engine import node_event, schedule_stream, send_spawned, take_landed, wake
from isthmus_planner.sim.event_queue import schedule
from isthmus_planner.sim.lanes import land
from isthmus_planner.sim.world import CLOSED, DONE, NEVER, TRACE, WANTS_TRACE, World


@inner
def _change_role(w: World, now: float) -> None:
    shared = w.shared[0]
    change = w.changes[shared.change_next]
    shared.change_next += 1
    node = w.nodes[change.node]
    node.next_role = change.role
    node.drains = 0 if change.role == node.role else 1
    wake(w, change.node, now)
    source = len(w.streams) + len(w.nodes) + len(w.lanes)
    schedule(w, source, max(now, w.changes[shared.change_next].at))


@compiled
def run(w: World) -> int:
    """Until nothing is left to happen, or the next part of the trace is needed first."""
    shared = w.shared[0]
    streams, nodes, lanes = len(w.streams), len(w.nodes), len(w.lanes)
    while True:
        if shared.trace_over == 0 and shared.trace_next >= shared.trace_count:
            return WANTS_TRACE
        if shared.heap_count == 0:
            return DONE
        now, source = w.heap_at[0], w.heap_source[0]
        shared.events += 1
        if source < streams:
            stream_event(w, source, now)
        elif source < streams + nodes:
            schedule(w, source, NEVER)
            node_event(w, source - streams, now)
        elif source < streams + nodes + lanes:
            take_landed(w, land(w, source - streams - nodes, now), now)
        else:
            _change_role(w, now)


@compiled
def start(w: World) -> None:
    """Each stream's first event; a trace's comes with its first part."""
    for s in range(len(w.streams)):
        stream = w.streams[s]
        if stream.kind == CLOSED and stream.rate == NEVER:
            stream.made = stream.requests
            stream.spawned = stream.requests
            send_spawned(w, s, 0.0)
        elif stream.kind != TRACE:
            stream.next_made = gap_s(w, s, FIRST)
            if stream.kind != CLOSED:
                stream.next_made += stream.overhead
            schedule_stream(w, s)
    if w.changes[0].at != NEVER:
        schedule(w, len(w.streams) + len(w.nodes) + len(w.lanes), w.changes[0].at)


@compiled
def go_on_with_trace(w: World, s: int) -> None:
    """Another part of the trace is there."""
    set_trace_time(w, s)
    schedule_stream(w, s)
