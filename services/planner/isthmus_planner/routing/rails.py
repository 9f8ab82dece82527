"""What crossings between nodes take now, from the relays' heartbeats and the ceilings in force. Pure.

A relay's heartbeat counts the bytes that it has sent and received. The most that a node was seen to move in a second
is what it can at least do; what it moves now is taken off that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from isthmus_planner.cost.speeds import CostConstants
from isthmus_planner.routing.kv_size import KvSize
from isthmus_shared.ids import Incarnation, NodeId
from isthmus_shared.messages.health import RelayHeartbeat, RelayRates
from isthmus_shared.messages.work import RelayRef

LEAST_FREE = 0.1
"""Of a busy rail: what a new flow gets at least, since flows share fairly."""
LEAST_INTERVAL_S = 0.05
"""Between two beats that a rate is taken from; closer ones (a change of state) say little."""


@dataclass(slots=True)
class _Direction:
    peak_bytes_per_s: float = 0.0
    now_bytes_per_s: float = 0.0

    def moved(self, bytes_per_s: float) -> None:
        self.now_bytes_per_s = bytes_per_s
        self.peak_bytes_per_s = max(self.peak_bytes_per_s, bytes_per_s)

    def free_bytes_per_s(self, assumed_bytes_per_s: float) -> float:
        most = max(self.peak_bytes_per_s, assumed_bytes_per_s)
        return most * max(LEAST_FREE, 1.0 - self.now_bytes_per_s / most)


@dataclass(slots=True)
class _Node:
    beat: RelayHeartbeat
    at_s: float
    sending: _Direction = field(default_factory=_Direction)
    receiving: _Direction = field(default_factory=_Direction)


@dataclass(frozen=True, slots=True)
class Rail:
    """One node's seconds per byte, now."""

    out_s_per_byte: float
    in_s_per_byte: float
    staging_free_bytes: float
    """Infinite while nothing is known."""


class Rails:
    def __init__(self, constants: CostConstants) -> None:
        self._constants = constants
        self._nodes: dict[NodeId, _Node] = {}
        self._ceilings: dict[tuple[Incarnation, Incarnation], float] = {}
        self._default_ceiling = math.inf
        self._ceilings_until_s = -math.inf

    @property
    def base_s(self) -> float:
        """Of any crossing, whatever its size."""
        return self._constants.crossing_base_s

    def beat(self, beat: RelayHeartbeat, now_s: float) -> None:
        node = self._nodes.get(beat.relay.node_id)
        if node is None or node.beat.incarnation != beat.incarnation:
            self._nodes[beat.relay.node_id] = _Node(beat, now_s)
            return
        took_s = now_s - node.at_s
        if took_s >= LEAST_INTERVAL_S:
            node.sending.moved(max(0, beat.sent_bytes - node.beat.sent_bytes) / took_s)
            node.receiving.moved(max(0, beat.received_bytes - node.beat.received_bytes) / took_s)
            node.beat, node.at_s = beat, now_s

    def rates(self, rates: RelayRates, now_s: float) -> None:
        """Ceilings as every relay has heard them; each message replaces the one before."""
        self._ceilings = {(lane.sender, lane.receiver): lane.bytes_per_s for lane in rates.lanes}
        self._default_ceiling = rates.default_bytes_per_s or math.inf
        self._ceilings_until_s = now_s + rates.valid_s

    def keep(self, nodes: set[NodeId]) -> None:
        self._nodes = {name: node for name, node in self._nodes.items() if name in nodes}

    def rail(self, node: NodeId, size: KvSize | None) -> Rail:
        """`size` None: nobody knows how many bytes a token has, and "bytes" are tokens."""
        known = self._nodes.get(node)
        assumed = self._constants.crossing_tokens_per_s * (1.0 if size is None else size.bytes_per_token)
        if known is None or size is None:
            return Rail(1.0 / assumed, 1.0 / assumed, math.inf)
        return Rail(
            1.0 / known.sending.free_bytes_per_s(assumed),
            1.0 / known.receiving.free_bytes_per_s(assumed),
            known.beat.pool_free_bytes,
        )

    def lives(self, relay: RelayRef) -> bool:
        node = self._nodes.get(relay.node_id)
        return node is not None and node.beat.relay.incarnation == relay.incarnation

    def bounded(self, now_s: float) -> bool:
        """Whether any ceiling is in force."""
        return now_s < self._ceilings_until_s and (bool(self._ceilings) or self._default_ceiling < math.inf)

    def ceiling_bytes_per_s(self, sender: NodeId, receiver: NodeId, now_s: float) -> float:
        """Of the lane between two nodes' relays; infinite without one."""
        if not self.bounded(now_s):
            return math.inf
        source, sink = self._nodes.get(sender), self._nodes.get(receiver)
        if source is None or sink is None:
            return self._default_ceiling
        lane = (source.beat.relay.incarnation, sink.beat.relay.incarnation)
        return self._ceilings.get(lane, self._default_ceiling)
