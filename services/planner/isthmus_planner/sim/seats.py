"""The sequences that a node decodes: a heap by the step at which each ends, since all advance one token per step."""

from __future__ import annotations

from isthmus_planner.sim.compiled import inner
from isthmus_planner.sim.world import World


@inner
def earliest_ends(w: World, n: int) -> int:
    return int(w.finish[n, 0])


@inner
def _before(w: World, n: int, step: int, slot: int, other: int) -> bool:
    """Equal ends come in the order of the requests' numbers, then of their streams."""
    there = w.finish[n, other]
    if step != there:
        return bool(step < there)
    mine, its = w.slots[slot], w.slots[w.finish_slot[n, other]]
    if mine.number != its.number:
        return bool(mine.number < its.number)
    return bool(mine.stream < its.stream)


@inner
def seat(w: World, n: int, slot: int, now: float) -> None:
    """It joins the batch; its first token is there already."""
    node, request = w.nodes[n], w.slots[slot]
    if node.running == 0:
        node.step_end = now
    request.seated_at = now
    request.fresh_next = node.fresh_head
    node.fresh_head = slot
    node.tokens += request.isl
    w.by_stream[n, request.stream, 0] += 1
    w.by_stream[n, request.stream, 1] += 1
    step = node.steps_done + request.osl - 1
    place = node.running
    node.running += 1
    while place > 0:
        parent = (place - 1) // 2
        if not _before(w, n, step, slot, parent):
            break
        w.finish[n, place] = w.finish[n, parent]
        w.finish_slot[n, place] = w.finish_slot[n, parent]
        place = parent
    w.finish[n, place] = step
    w.finish_slot[n, place] = slot


@inner
def unseat(w: World, n: int) -> int:
    """The one that has ended leaves the batch."""
    node = w.nodes[n]
    gone = w.finish_slot[n, 0]
    request = w.slots[gone]
    node.running -= 1
    node.tokens -= request.isl + request.osl - 1
    w.by_stream[n, request.stream, 0] -= 1
    last = node.running
    if last == 0:
        return int(gone)
    step, slot = w.finish[n, last], w.finish_slot[n, last]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= last:
            break
        if child + 1 < last and _before(w, n, w.finish[n, child + 1], w.finish_slot[n, child + 1], child):
            child += 1
        if _before(w, n, step, slot, child):
            break
        w.finish[n, place] = w.finish[n, child]
        w.finish_slot[n, place] = w.finish_slot[n, child]
        place = child
    w.finish[n, place] = step
    w.finish_slot[n, place] = slot
    return int(gone)
