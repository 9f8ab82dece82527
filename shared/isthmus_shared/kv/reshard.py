"""Which tensor-parallel rank of the producer sends which KV heads to which ranks of the consumer. Pure.

As vLLM and Megatron do it, rank r of tp has heads r · H / tp … while tp ≤ H; with more ranks than heads each head is
on tp / H neighbouring ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from isthmus_shared.errors import ManifestMismatch


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads `start … end − 1` of the model."""

    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class HeadFlow:
    """One flow: heads that one producer rank sends and that the same consumer ranks want.

    A head is in exactly one flow, whatever is replicated: a copy that two consumer ranks want is staged once.
    """

    producer_rank: int
    consumer_ranks: tuple[int, ...]
    heads: Heads


def heads_of(rank: int, tp: int, kv_heads: int) -> Heads:
    """What a rank holds. Raises `ManifestMismatch` when heads and ranks do not divide."""
    assert 0 <= rank < tp, f"rank {rank} of {tp}"
    if kv_heads % tp == 0:
        return Heads(rank * (kv_heads // tp), kv_heads // tp)
    if tp % kv_heads == 0:
        return Heads(rank // (tp // kv_heads), 1)
    raise ManifestMismatch(
        f"{kv_heads} KV heads cannot be split over {tp} tensor-parallel ranks",
        why="one must be a multiple of the other",
        todo=f"choose a tensor-parallel size that divides {kv_heads}, or a multiple of it",
        param="tensor_parallel_size",
    )


def owned_heads(kv_heads: int, tp: int) -> tuple[Heads | None, ...]:
    """What each producer rank sends: of replicas only the first does; None is nothing."""
    replicas = max(1, tp // kv_heads)
    return tuple(heads_of(rank, tp, kv_heads) if rank % replicas == 0 else None for rank in range(tp))


def plan_flows(kv_heads: int, producer_tp: int, consumer_tp: int) -> tuple[HeadFlow, ...]:
    """All flows of one prompt, in order of heads. A latent is one head: `plan_flows(1, p, d)` is one flow.

    Raises `ManifestMismatch` when either side's ranks do not divide the heads.
    """
    wanted = [heads_of(rank, consumer_tp, kv_heads) for rank in range(consumer_tp)]
    flows = []
    for rank, owned in enumerate(owned_heads(kv_heads, producer_tp)):
        if owned is None:
            continue
        inner = {edge for heads in wanted for edge in (heads.start, heads.end) if owned.start < edge < owned.end}
        for start, end in itertools.pairwise(sorted({owned.start, owned.end} | inner)):
            takers = tuple(taker for taker, heads in enumerate(wanted) if heads.start <= start < heads.end)
            flows.append(HeadFlow(rank, takers, Heads(start, end - start)))
    return tuple(flows)
