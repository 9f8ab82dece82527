"""Where a request goes: the pair of nodes, or the aggregated node, with the least predicted end-to-end latency."""

from __future__ import annotations

from isthmus_planner.sim.compiled import inner
from isthmus_planner.sim.engine import seconds_of
from isthmus_planner.sim.prefix_cache import cached_blocks
from isthmus_planner.sim.world import DECODE, IDLE, NEVER, NONE, PREFILL, World


@inner
def _new_tokens(w: World, n: int, isl: int, cached: int, begin: int, end: int) -> int:
    """Of a prompt on this node: at least one is computed, since the first token comes from it."""
    node = w.nodes[n]
    if end > begin and node.cache_blocks > 0:
        cached = max(cached, cached_blocks(w, n, begin, end) * w.shared[0].trace_block_tokens)
    return max(1, isl - cached)


@inner
def _backlog_s(w: World, n: int, now: float) -> float:
    """Until a prompt that arrives now would begin."""
    node = w.nodes[n]
    under_way = now - node.since if node.doing != IDLE and node.passing > 0 else 0.0
    return float(max(0.0, node.queue_work - under_way))


@inner
def _step_s(w: World, n: int, isl: int, osl: int) -> float:
    """Of decode with this request among all that were sent there, more if they don't fit at once."""
    node = w.nodes[n]
    batch = node.assigned + 1
    seats = min(batch, node.max_batch)
    kv = (node.assigned_kv + isl + osl) / node.kv_capacity
    crowd = max(1.0, batch / node.max_batch, kv)
    tokens = (node.assigned_tokens + isl + 0.5 * osl) / crowd
    over = max(0.0, tokens - node.over)
    return float((w.a_s[node.a_offset + seats - 1] + node.b * tokens + node.c * over) * crowd)


@inner
def route(w: World, slot: int, cached: int, begin: int, end: int, now: float) -> bool:
    """Choose, and write it down in the slot and the nodes. False: no node may take it."""
    request = w.slots[slot]
    model = w.streams[request.stream].model
    isl, osl = request.isl, request.osl
    best_p, best_d, best_whole = NONE, NONE, NONE
    least_p, least_d, least_whole = NEVER, NEVER, NEVER
    for n in range(len(w.nodes)):
        node = w.nodes[n]
        if node.model != model or node.drains != 0:
            continue
        if node.role == PREFILL:
            if isl <= node.staging_capacity:
                new = _new_tokens(w, n, isl, cached, begin, end)
                seconds = _backlog_s(w, n, now) + seconds_of(w, n, new, isl - new)
                if seconds < least_p:
                    best_p, least_p = n, seconds
        elif isl + osl <= node.kv_capacity:
            seconds = _step_s(w, n, isl, osl) * osl
            if node.role == DECODE:
                if seconds < least_d:
                    best_d, least_d = n, seconds
            else:
                new = _new_tokens(w, n, isl, cached, begin, end)
                seconds += _backlog_s(w, n, now) + seconds_of(w, n, new, isl - new)
                if seconds < least_whole:
                    best_whole, least_whole = n, seconds
    paired = best_p != NONE and best_d != NONE
    if best_whole != NONE and (not paired or least_whole <= least_p + least_d):
        best_p, best_d = best_whole, best_whole
    elif not paired:
        return False
    new = _new_tokens(w, best_p, isl, cached, begin, end)
    _assign(w, slot, best_p, best_d, new)
    return True


@inner
def _assign(w: World, slot: int, p: int, d: int, new: int) -> None:
    request, source, node = w.slots[slot], w.nodes[p], w.nodes[d]
    request.prefill = p
    request.decode = d
    request.left = new
    request.predicted = seconds_of(w, p, new, request.isl - new)
    source.hit_tokens += request.isl - new
    source.asked_tokens += request.isl
    if p != d:
        source.assigned += 1
    node.assigned += 1
    node.assigned_kv += request.isl + request.osl
    node.assigned_tokens += request.isl + 0.5 * request.osl
