"""The lanes' ceilings: how much KV a decode node can take in before its steps take longer than was promised. Pure.

Bytes that arrive cost the receiving host time, so a share `u = r · κ` of its steps is lost, and `ITL = τ / (1 − u)`.
So the most that keeps the target is `r_max = (1 − τ / SLO) / κ`, with κ the receiver's seconds per byte (postings per
descriptor and copies in one figure). Source: the project's cost model, rule 5. Below its ceiling a lane is held by its
own feedback, so a ceiling needs to be right only within a factor; it bounds what a burst does before feedback acts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus_shared.ids import Incarnation, NodeId
from isthmus_shared.messages.health import LaneRate

HOST_S_PER_BYTE = 0.2e-9
"""κ where nothing was measured: one copy of 5 GB/s by a core that the steps would have had."""
FLOOR_SHARE = 0.05
"""Of `1 / κ` that a lane always has: a worker whose steps alone are too long gets its KV all the same."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """A node with decode workers."""

    node_id: NodeId
    relay: Incarnation
    step_s: float
    """τ, of the slowest of them as its load is predicted."""
    itl_s: float
    """The target there."""
    host_s_per_byte: float | None = None
    """Measured; None: `HOST_S_PER_BYTE`."""


@dataclass(frozen=True, slots=True)
class Sender:
    """A node with prefill workers."""

    node_id: NodeId
    relay: Incarnation
    weight: float
    """What it will send, relative to the others."""


def most_bytes_per_s(step_s: float, itl_s: float, host_s_per_byte: float) -> float:
    """`r_max`, and never less than the floor."""
    return max(FLOOR_SHARE, 1.0 - step_s / itl_s) / host_s_per_byte


def lane_rates(senders: Sequence[Sender], receivers: Sequence[Receiver]) -> tuple[LaneRate, ...]:
    """One ceiling per pair of nodes, by node names; those into one node share its `r_max`, each with the floor at
    least. A node's own lane has none: what stays within it crosses no wire."""
    rates = []
    for receiver in sorted(receivers, key=lambda r: r.node_id):
        others = sorted((s for s in senders if s.node_id != receiver.node_id), key=lambda s: s.node_id)
        host_s = receiver.host_s_per_byte or HOST_S_PER_BYTE
        most = most_bytes_per_s(receiver.step_s, receiver.itl_s, host_s)
        whole = sum(sender.weight for sender in others)
        for sender in others:
            share = sender.weight / whole if whole > 0 else 1.0 / len(others)
            ceiling = max(most * share, FLOOR_SHARE / host_s / len(others))
            rates.append(LaneRate(sender=sender.relay, receiver=receiver.relay, bytes_per_s=ceiling))
    return tuple(rates)
