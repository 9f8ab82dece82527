"""KV on its way: room at the decode node first, then one flow at a time on each lane, at the rate that sender,
receiver, credit and pace allow.

A relay serves the earliest deadline first, which among equals is the order of arrival. Lanes that meet in one node
divide its link evenly.
"""

from __future__ import annotations

import math

from isthmus_planner.sim.compiled import inner
from isthmus_planner.sim.event_queue import schedule
from isthmus_planner.sim.measure import hold_kv
from isthmus_planner.sim.pacing import level_after, level_at, send_s, sent_bytes
from isthmus_planner.sim.runs import set_share
from isthmus_planner.sim.world import NEVER, NONE, World


@inner
def wait_for_room(w: World, slot: int) -> None:
    """In order of arrival at the decode node, as the relay's KV-block credit has it."""
    node = w.nodes[w.slots[slot].decode]
    w.slots[slot].next = NONE
    if node.room_tail == NONE:
        node.room_head = slot
    else:
        w.slots[node.room_tail].next = slot
    node.room_tail = slot


@inner
def admit(w: World, d: int, now: float) -> None:
    """Those for which the decode node has room now."""
    node = w.nodes[d]
    while node.room_head != NONE:
        slot = node.room_head
        request = w.slots[slot]
        if node.kv_used + request.isl + request.osl > node.kv_capacity:
            return
        node.room_head = request.next
        if node.room_head == NONE:
            node.room_tail = NONE
        hold_kv(w, d, request.isl + request.osl, now)
        request.granted_at = now
        _send(w, slot, now)


@inner
def _send(w: World, slot: int, now: float) -> None:
    request = w.slots[slot]
    lane = w.lanes[request.prefill * len(w.nodes) + request.decode]
    request.next = NONE
    if lane.slot == NONE:
        _begin(w, request.prefill, request.decode, slot, now)
    elif lane.tail == NONE:
        lane.head = slot
        lane.tail = slot
    else:
        w.slots[lane.tail].next = slot
        lane.tail = slot


@inner
def _begin(w: World, p: int, d: int, slot: int, now: float) -> None:
    source, node, shared = w.nodes[p], w.nodes[d], w.shared[0]
    lane = w.lanes[p * len(w.nodes) + d]
    lane.slot = slot
    lane.left = max(1.0, w.slots[slot].isl * source.kv_bytes)
    lane.begins = now + shared.setup
    lane.begins += node.receive_pair * w.slots[slot].isl * max(0.0, node.kv_used - node.over)
    lane.outstanding = 0
    if node.queue_depth > 0:
        window = min(lane.left, shared.window_bytes)
        descriptors = math.ceil(window / node.queue_descriptor_bytes)
        under_way = 0
        for other in range(len(w.nodes)):
            under_way += w.lanes[other * len(w.nodes) + d].outstanding
        if under_way + descriptors > node.queue_depth:
            node.overflows += 1
            lane.begins += node.queue_retry
        lane.outstanding = descriptors
    lane.level = level_at(lane.level, lane.level_at, lane.begins, shared.pace, shared.burst)
    lane.level_at = lane.begins
    source.lanes_out += 1
    node.lanes_in += 1
    source.sent += lane.left
    node.received += lane.left
    lane.wire = 0.0
    _share_out(w, p, d, now)


@inner
def _wire_rate(w: World, p: int, d: int) -> float:
    """Bytes per second that this lane may have now, beside its pace."""
    source, node = w.nodes[p], w.nodes[d]
    rate = min(source.link / max(1, source.lanes_out), node.link / max(1, node.lanes_in))
    return float(min(rate, w.shared[0].lane_rate, node.posting_rate))


@inner
def _share_out(w: World, p: int, d: int, now: float) -> None:
    """A lane has begun or ended: it and those that it shares a link with go on at other rates."""
    nodes = len(w.nodes)
    _retime(w, p, d, now)
    own = 0 if w.lanes[p * nodes + d].slot == NONE else 1
    if w.nodes[p].lanes_out > own:
        for other in range(nodes):
            if other != d:
                _retime(w, p, other, now)
    if w.nodes[d].lanes_in > own:
        for other in range(nodes):
            if other != p:
                _retime(w, other, d, now)


@inner
def _retime(w: World, p: int, d: int, now: float) -> None:
    """Take stock of what has left, and say when the rest will have."""
    index = p * len(w.nodes) + d
    lane, shared = w.lanes[index], w.shared[0]
    if lane.slot == NONE:
        return
    wire = _wire_rate(w, p, d)
    if wire == lane.wire:
        return
    if now > lane.begins and lane.wire > 0.0:
        elapsed = now - lane.begins
        left = sent_bytes(elapsed, lane.left, lane.level, shared.pace, lane.wire)
        if shared.pace != math.inf:
            lane.level = max(0.0, min(shared.burst, lane.level + shared.pace * elapsed - left))
        lane.left = max(0.0, lane.left - left)
        lane.begins = now
        lane.level_at = now
    lane.wire = wire
    takes_s = 0.0
    if lane.left > 0.0:
        takes_s = send_s(lane.left, shared.chunk, lane.level, shared.pace, wire)
    schedule(w, len(w.streams) + len(w.nodes) + index, lane.begins + takes_s)
    node = w.nodes[d]
    if node.share_per_rate > 0.0:
        share = lane.left / takes_s * node.share_per_rate if takes_s > 0.0 else 0.0
        lost = node.share - lane.share
        lane.share = share
        set_share(w, d, max(0.0, lost + share), now)


@inner
def land(w: World, index: int, now: float) -> int:
    """All of the flow under way has arrived: which request it was. The lane goes on with its next."""
    p, d = index // len(w.nodes), index % len(w.nodes)
    lane, shared, node = w.lanes[index], w.shared[0], w.nodes[d]
    slot = lane.slot
    if lane.left > 0.0:
        lane.level = level_after(lane.left, shared.chunk, lane.level, shared.pace, lane.wire, shared.burst)
        last = lane.left - (math.ceil(lane.left / shared.chunk) - 1.0) * shared.chunk
        lane.level_at = now - last / lane.wire
    lane.slot = NONE
    lane.outstanding = 0
    w.nodes[p].lanes_out -= 1
    node.lanes_in -= 1
    schedule(w, len(w.streams) + len(w.nodes) + index, NEVER)
    if node.share_per_rate > 0.0:
        share = max(0.0, node.share - lane.share)
        lane.share = 0.0
        set_share(w, d, share if node.lanes_in > 0 else 0.0, now)
    following = lane.head
    if following != NONE:
        lane.head = w.slots[following].next
        if lane.head == NONE:
            lane.tail = NONE
        _begin(w, p, d, following, now)
    else:
        _share_out(w, p, d, now)
    w.slots[slot].landed_at = now
    return int(slot)
