"""What prefix hashes cost: making them at the ingress, and looking them up and keeping them in the planner.

CPU seconds of this process; memory by the growth of its peak. Prints the table of docs/prefix-cache.md.

PYTHONPATH=shared:services/planner python bench/prefix_index.py
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable

from isthmus_planner.prefix.index import MAX_HASHES, PrefixIndex
from isthmus_shared.ids import Incarnation
from isthmus_shared.prefix import prefix_hashes

LENGTHS_TOKENS = (1000, 8192, 131_072)
WORKERS = (64, 1000)
HOLDERS_SHARE = 4
"""One worker in so many has the prompt."""


def cpu_us(call: Callable[[], object], *, least_s: float = 0.2) -> float:
    """Of one call, over at least that long."""
    calls, began_s = 0, time.process_time()
    while (took_s := time.process_time() - began_s) < least_s:
        call()
        calls += 1
    return took_s / calls * 1e6


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def filled(workers: int) -> PrefixIndex:
    """As many hashes as it holds, none of them alike."""
    index = PrefixIndex()
    lives = [Incarnation(f"life-{number}") for number in range(workers)]
    for life in lives:
        index.change(life, (), ())
    for life in lives:
        index.change(life, (os.urandom(8) for _ in range(MAX_HASHES // workers * 9 // 10)), ())
    return index


def main() -> None:
    for tokens in LENGTHS_TOKENS:
        prompt = tuple(range(tokens))
        print(f"hashes of {tokens:,} tokens: {cpu_us(lambda prompt=prompt: prefix_hashes(prompt, 'salt')):.1f} us")
    known, unknown = prefix_hashes(range(8192), "salt"), prefix_hashes(range(8192), "another")
    for workers in WORKERS:
        before_bytes = peak_bytes()
        index = filled(workers)
        grown_bytes = peak_bytes() - before_bytes
        for number in range(0, workers, HOLDERS_SHARE):
            index.change(Incarnation(f"life-{number}"), known, ())
        cold_us = cpu_us(lambda index=index: index.cached_tokens(unknown))
        hit_us = cpu_us(lambda index=index: index.cached_tokens(known))
        print(f"{workers} workers, {len(index):,} hashes: {cold_us:.1f} us where nobody has the prompt,", end=" ")
        print(
            f"{hit_us:.1f} us where {workers // HOLDERS_SHARE} have it; peak memory grew by {grown_bytes / 1e6:.0f} MB"
        )


if __name__ == "__main__":
    main()
