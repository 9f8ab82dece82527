"""A node's prefix cache for traces with block hashes: a set of blocks, least recently used first out.

A hash map by open addressing points into a doubly linked list in order of use; both have a fixed size.
"""

from __future__ import annotations

from isthmus_planner.sim.compiled import inner
from isthmus_planner.sim.exact import mix
from isthmus_planner.sim.world import NONE, World


@inner
def _place_of(w: World, n: int, block: int) -> int:
    """Where it is in the map, or where it would go."""
    node = w.nodes[n]
    place = int(mix(block) & 0x7FFFFFFFFFFFFFFF) & node.map_mask
    while True:
        entry = w.cache_map[node.map_base + place]
        if entry == 0 or w.cache_hash[node.cache_base + entry - 1] == block:
            return int(place)
        place = (place + 1) & node.map_mask


@inner
def cached_blocks(w: World, n: int, begin: int, end: int) -> int:
    """How many of the first blocks of a prompt the node has; `begin` and `end` are places in `trace_blocks`."""
    node = w.nodes[n]
    if node.cache_blocks == 0:
        return 0
    for i in range(begin, end):
        if w.cache_map[node.map_base + _place_of(w, n, w.trace_blocks[i])] == 0:
            return i - begin
    return end - begin


@inner
def remember_blocks(w: World, n: int, begin: int, end: int) -> None:
    """The prompt's blocks become the newest, its first one last, so that a prefix outlives what follows it."""
    node = w.nodes[n]
    if node.cache_blocks == 0:
        return
    for i in range(end - 1, begin - 1, -1):
        block = w.trace_blocks[i]
        place = _place_of(w, n, block)
        entry = w.cache_map[node.map_base + place] - 1
        if entry == NONE:
            if node.cache_used < node.cache_blocks:
                entry = node.cache_used
                node.cache_used += 1
            else:
                entry = node.cache_oldest
                _unlink(w, n, entry)
                _forget(w, n, w.cache_hash[node.cache_base + entry])
                place = _place_of(w, n, block)
            w.cache_hash[node.cache_base + entry] = block
            w.cache_map[node.map_base + place] = entry + 1
        else:
            _unlink(w, n, entry)
        _make_newest(w, n, entry)


@inner
def _unlink(w: World, n: int, entry: int) -> None:
    node, base = w.nodes[n], w.nodes[n].cache_base
    older, newer = w.cache_older[base + entry], w.cache_newer[base + entry]
    if newer == NONE:
        node.cache_newest = older
    else:
        w.cache_older[base + newer] = older
    if older == NONE:
        node.cache_oldest = newer
    else:
        w.cache_newer[base + older] = newer


@inner
def _make_newest(w: World, n: int, entry: int) -> None:
    node, base = w.nodes[n], w.nodes[n].cache_base
    w.cache_newer[base + entry] = NONE
    w.cache_older[base + entry] = node.cache_newest
    if node.cache_newest == NONE:
        node.cache_oldest = entry
    else:
        w.cache_newer[base + node.cache_newest] = entry
    node.cache_newest = entry


@inner
def _forget(w: World, n: int, block: int) -> None:
    """Out of the map; those behind it move up, so that none is cut off from where its search begins."""
    node = w.nodes[n]
    base, mask = node.map_base, node.map_mask
    hole = _place_of(w, n, block)
    place = hole
    while True:
        place = (place + 1) & mask
        entry = w.cache_map[base + place]
        if entry == 0:
            break
        home = int(mix(w.cache_hash[node.cache_base + entry - 1]) & 0x7FFFFFFFFFFFFFFF) & mask
        if ((place - home) & mask) >= ((place - hole) & mask):
            w.cache_map[base + hole] = entry
            hole = place
    w.cache_map[base + hole] = 0
