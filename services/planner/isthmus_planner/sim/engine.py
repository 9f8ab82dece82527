"""What a node does next: prompts, a run of decode steps, a step with both, or nothing."""

from __future__ import annotations

import math

from isthmus_planner.sim.compiled import inner
from isthmus_planner.sim.event_queue import schedule
from isthmus_planner.sim.lanes import admit, wait_for_room
from isthmus_planner.sim.measure import count_request, count_step, hold_kv
from isthmus_planner.sim.runs import cut_run, finish_run, start_run
from isthmus_planner.sim.seats import earliest_ends, seat, unseat
from isthmus_planner.sim.world import (
    AGGREGATED,
    COMPUTING_PROMPTS,
    DECODE,
    IDLE,
    MIXING,
    NEVER,
    NONE,
    PREFILL,
    RUNNING,
    World,
)


@inner
def take_prompt(w: World, slot: int, now: float) -> None:
    """A routed request gets in line at its prefill node (or its only one)."""
    request = w.slots[slot]
    n = request.prefill
    node = w.nodes[n]
    request.next = NONE
    node.queue_work += request.predicted
    if node.queue_tail != NONE:
        w.slots[node.queue_tail].next = slot
        node.queue_tail = slot
        return
    node.queue_head = slot
    node.queue_tail = slot
    if node.doing == RUNNING:
        cut_run(w, n, now)
    else:
        wake(w, n, now)


@inner
def take_landed(w: World, slot: int, now: float) -> None:
    """A request's KV is at its decode node: it joins at the next step boundary that has a seat."""
    request = w.slots[slot]
    d, p = request.decode, request.prefill
    node, source = w.nodes[d], w.nodes[p]
    request.next = NONE
    if node.landed_tail == NONE:
        node.landed_head = slot
    else:
        w.slots[node.landed_tail].next = slot
    node.landed_tail = slot
    if node.doing == RUNNING:
        if node.running < node.max_batch:
            cut_run(w, d, now)
    else:
        wake(w, d, now)
    source.staging_used -= request.isl
    wake(w, p, now)


@inner
def wake(w: World, n: int, now: float) -> None:
    if w.nodes[n].doing == IDLE:
        go_on(w, n, now)


@inner
def node_event(w: World, n: int, now: float) -> None:
    """The pass, step or run under way has ended."""
    node = w.nodes[n]
    doing = node.doing
    node.doing = IDLE
    if doing == RUNNING:
        finish_run(w, n, now)
    elif doing == MIXING:
        _finish_step(w, n, now)
    if doing != COMPUTING_PROMPTS:
        while node.running > 0 and earliest_ends(w, n) == node.steps_done:
            _end(w, unseat(w, n), now)
    if doing != RUNNING:
        _finish_prompts(w, n, now)
    if node.role == DECODE:
        admit(w, n, now)
    go_on(w, n, now)


@inner
def go_on(w: World, n: int, now: float) -> None:
    """At a boundary: who waits for a seat sits down, then the next piece of work begins."""
    node = w.nodes[n]
    while node.landed_head != NONE and node.running < node.max_batch:
        slot = node.landed_head
        node.landed_head = w.slots[slot].next
        if node.landed_head == NONE:
            node.landed_tail = NONE
        seat(w, n, slot, now)
        node.run_stall += node.stall + node.stall_token * w.slots[slot].isl
    if node.queue_head != NONE and _begin_prompts(w, n, now):
        return
    if node.running > 0:
        start_run(w, n, now)
        return
    node.doing = IDLE
    schedule(w, len(w.streams) + n, NEVER)
    if node.drains != 0 and node.assigned == 0 and node.staging_used == 0:
        node.role = node.next_role
        node.drains = 0


@inner
def _admit_prompt(w: World, n: int, slot: int, now: float) -> bool:
    """Whether there is memory for it (and a seat); it is taken."""
    node, request = w.nodes[n], w.slots[slot]
    if node.role == PREFILL:
        if node.staging_used + request.isl > node.staging_capacity:
            return False
        node.staging_used += request.isl
        node.staging_peak = max(node.staging_peak, node.staging_used)
    else:
        need = request.isl + request.osl
        if node.kv_used + need > node.kv_capacity or node.running + node.passing >= node.max_batch:
            return False
        hold_kv(w, n, need, now)
    request.started_at = now
    return True


@inner
def _begin_prompts(w: World, n: int, now: float) -> bool:
    """As many prompts, or parts of them, as one pass computes. False: none could be begun."""
    node = w.nodes[n]
    mixes = node.role == AGGREGATED and node.prefill_first == 0
    budget = node.pass_tokens - (node.running if mixes else 0)
    budget = max(1, budget)
    work, tokens, passes = 0.0, 0, 1
    node.passing = 0
    slot = node.queue_head
    while slot != NONE and budget > 0:
        request = w.slots[slot]
        take = min(request.left, budget)
        if take < request.left and node.role == PREFILL:
            if node.passing > 0:
                break
            take = request.left
            passes = (take + node.pass_tokens - 1) // node.pass_tokens
        if request.started_at == NEVER and not _admit_prompt(w, n, slot, now):
            break
        before = request.isl - request.left
        work += node.p_token * take + node.p_pair * take * (before + 0.5 * take)
        tokens += take
        budget -= take
        request.taken = take
        node.passing += 1
        slot = request.next
    if node.passing == 0:
        return False
    seconds = node.p_base * passes + max(node.p_floor * passes, work) + node.p_extra * tokens
    if node.running > 0:
        seconds *= 1.0 + node.interference
    node.since = now
    node.doing = COMPUTING_PROMPTS
    if mixes and node.running > 0:
        node.doing = MIXING
        over = max(0.0, node.tokens - node.over)
        seconds += w.a_s[node.a_offset + node.running - 1] + node.b * node.tokens + node.c * over
    schedule(w, len(w.streams) + n, now + seconds)
    return True


@inner
def _finish_step(w: World, n: int, now: float) -> None:
    """The decode half of a mixed step."""
    node = w.nodes[n]
    elapsed = now - node.since
    node.decode_busy += elapsed
    node.batch_integral += elapsed * node.running
    node.steps += 1
    node.steps_done += 1
    node.decoded_tokens += node.running
    node.tokens += node.running
    count_step(w, n, now)
    node.step_end = now


@inner
def _finish_prompts(w: World, n: int, now: float) -> None:
    node = w.nodes[n]
    node.prefill_busy += now - node.since
    while node.passing > 0:
        slot = node.queue_head
        request = w.slots[slot]
        node.passing -= 1
        request.left -= request.taken
        node.prefilled_tokens += request.taken
        request.taken = 0
        if request.left > 0:
            node.passing = 0
            break
        node.queue_head = request.next
        if node.queue_head == NONE:
            node.queue_tail = NONE
        node.queue_work = max(0.0, node.queue_work - request.predicted)
        node.prefilled_requests += 1
        _first_token(w, n, slot, now)


@inner
def _first_token(w: World, n: int, slot: int, now: float) -> None:
    """The prompt is done: its KV waits in staging for the decode node, or decodes here."""
    node, request = w.nodes[n], w.slots[slot]
    request.first_at = now
    request.granted_at = now
    request.landed_at = now
    request.seated_at = now
    if request.osl == 1:
        if node.role == PREFILL:
            node.staging_used -= request.isl
        _end(w, slot, now)
    elif node.role == PREFILL:
        node.assigned -= 1
        wait_for_room(w, slot)
        admit(w, request.decode, now)
    else:
        seat(w, n, slot, now)


@inner
def _end(w: World, slot: int, now: float) -> None:
    """All that it holds is given back, and a client is free again."""
    request = w.slots[slot]
    d, p = request.decode, request.prefill
    node, stream = w.nodes[d], w.streams[request.stream]
    count_request(w, slot, now)
    node.assigned -= 1
    node.assigned_kv -= request.isl + request.osl
    node.assigned_tokens -= request.isl + 0.5 * request.osl
    if p != d and request.osl == 1:
        w.nodes[p].assigned -= 1
    else:
        hold_kv(w, d, -(request.isl + request.osl), now)
    release(w, slot, now)
    stream.in_flight -= 1


@inner
def release(w: World, slot: int, now: float) -> None:
    """The slot is free, and so is the client that waited for it."""
    request = w.slots[slot]
    stream_index = request.stream
    request.next = w.shared[0].free_slot
    w.shared[0].free_slot = slot
    client_free(w, stream_index, now)


@inner
def client_free(w: World, s: int, now: float) -> None:
    """A closed loop's client sends its next request, if one has come into being."""
    stream = w.streams[s]
    stream.free += 1
    send_spawned(w, s, now)


@inner
def send_spawned(w: World, s: int, now: float) -> None:
    stream = w.streams[s]
    while stream.free > 0 and stream.spawned > 0:
        stream.free -= 1
        stream.spawned -= 1
        place = (stream.ring_head + stream.ring_count) % stream.clients
        w.ring[stream.ring_base + place] = now
        stream.ring_count += 1
        stream.sent += 1
        stream.last_sent = now
        schedule_stream(w, s)


@inner
def schedule_stream(w: World, s: int) -> None:
    """The next thing that a stream does: a request comes into being, or one that was sent arrives."""
    stream = w.streams[s]
    at_s = stream.next_made
    if stream.ring_count > 0:
        at_s = min(at_s, w.ring[stream.ring_base + stream.ring_head] + stream.overhead)
    schedule(w, s, at_s)


@inner
def seconds_of(w: World, n: int, new: int, cached: int) -> float:
    """What a prompt alone will take on this node."""
    node = w.nodes[n]
    passes = math.ceil(new / node.pass_tokens)
    work = node.p_token * new + node.p_pair * new * (cached + 0.5 * new)
    return float(node.p_base * passes + max(node.p_floor * passes, work) + node.p_extra * new)
