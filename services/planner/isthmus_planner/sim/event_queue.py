"""The next event of each source (a stream, a node, a lane): a binary heap in which a source's time can change.

Equal times come in the order of the sources' numbers, so that the order is a function of the scenario alone.
"""

from __future__ import annotations

from isthmus_planner.sim.compiled import inner
from isthmus_planner.sim.world import NEVER, NONE, World


@inner
def schedule(w: World, source: int, at_s: float) -> None:
    """Set, or with NEVER remove, the one event of a source."""
    place = w.heap_place[source]
    if at_s == NEVER:
        if place != NONE:
            _remove(w, place)
        return
    if place == NONE:
        place = w.shared[0].heap_count
        w.shared[0].heap_count += 1
        w.heap_at[place] = at_s
        w.heap_source[place] = source
        w.heap_place[source] = place
        _up(w, place)
        return
    earlier = at_s < w.heap_at[place]
    w.heap_at[place] = at_s
    if earlier:
        _up(w, place)
    else:
        _down(w, place)


@inner
def _remove(w: World, place: int) -> None:
    last = w.shared[0].heap_count - 1
    w.shared[0].heap_count = last
    w.heap_place[w.heap_source[place]] = NONE
    if place != last:
        w.heap_at[place] = w.heap_at[last]
        w.heap_source[place] = w.heap_source[last]
        w.heap_place[w.heap_source[place]] = place
        _up(w, place)
        _down(w, place)


@inner
def _up(w: World, place: int) -> None:
    at_s, source = w.heap_at[place], w.heap_source[place]
    while place > 0:
        parent = (place - 1) // 2
        above, other = w.heap_at[parent], w.heap_source[parent]
        if above < at_s or (above == at_s and other < source):
            break
        w.heap_at[place] = above
        w.heap_source[place] = other
        w.heap_place[other] = place
        place = parent
    w.heap_at[place] = at_s
    w.heap_source[place] = source
    w.heap_place[source] = place


@inner
def _down(w: World, place: int) -> None:
    count = w.shared[0].heap_count
    at_s, source = w.heap_at[place], w.heap_source[place]
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count:
            left, right = w.heap_at[child], w.heap_at[child + 1]
            if right < left or (right == left and w.heap_source[child + 1] < w.heap_source[child]):
                child += 1
        below, other = w.heap_at[child], w.heap_source[child]
        if at_s < below or (at_s == below and source < other):
            break
        w.heap_at[place] = below
        w.heap_source[place] = other
        w.heap_place[other] = place
        place = child
    w.heap_at[place] = at_s
    w.heap_source[place] = source
    w.heap_place[source] = place
