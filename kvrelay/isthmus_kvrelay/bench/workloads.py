"""What is moved: the three shapes that KV takes on its way, and one small transfer for latency."""

from __future__ import annotations

import random
from dataclasses import dataclass

KIB = 1 << 10
MIB = 1 << 20
POOL_BYTES = 256 * MIB
"""Memory that a raw contender moves from and into; scattered blocks lie anywhere in it."""


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    blocks: int
    block_bytes: int
    seed: int

    @property
    def total_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def latency(self) -> bool:
        """One transfer's time is the figure, not bytes per second."""
        return self.total_bytes <= MIB

    def scattered(self) -> list[tuple[int, int, int]]:
        """(offset at the source, offset at the target, bytes) of every block, the same in every process."""
        rng = random.Random(self.seed)
        places = range(POOL_BYTES // self.block_bytes)
        there, here = rng.sample(places, self.blocks), rng.sample(places, self.blocks)
        size = self.block_bytes
        return [(a * size, b * size, size) for a, b in zip(there, here, strict=True)]


WORKLOADS = {
    each.name: each
    for each in (
        Workload("1 x 256 MiB", 1, 256 * MIB, 1),
        Workload("64 x 16 x 64 KiB", 64 * 16, 64 * KIB, 2),
        Workload("4096 x 16 KiB", 4096, 16 * KIB, 3),
        Workload("1 x 1 MiB", 1, MIB, 4),
    )
}
