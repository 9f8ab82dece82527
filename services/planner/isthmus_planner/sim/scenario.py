"""What is simulated: nodes, the relay between them, streams of requests, the mechanisms in force, a seed."""

from __future__ import annotations

from dataclasses import dataclass, field

from isthmus_planner.sim.hardware import Node, Relay, Role, require, require_number
from isthmus_planner.sim.workload import FromTrace, Stream

MAX_NODES = 1024
"""Each pair of nodes has a lane: a million of them, at 128 bytes each."""
MAX_REQUESTS_IN_FLIGHT = 4_000_000
"""Slots for them are made before the start, at some 150 bytes each."""


@dataclass(frozen=True, slots=True)
class Mechanisms:
    """Which of the effects that the nodes describe are in force. None is a proven cause of any published figure."""

    transfer_stall: bool = True
    descriptor_posting: bool = True
    resident_kv: bool = True
    aggregated_interference: bool = True
    nic_queue_overflow: bool = True


@dataclass(frozen=True, slots=True)
class RoleChange:
    """From then on the node takes no new work; it changes when it has none left. No request is dropped."""

    at_s: float
    node: str
    role: Role


@dataclass(frozen=True, slots=True)
class Scenario:
    nodes: tuple[Node, ...]
    streams: tuple[Stream, ...]
    relay: Relay = field(default_factory=Relay)
    mechanisms: Mechanisms = field(default_factory=Mechanisms)
    role_changes: tuple[RoleChange, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        require(0 < len(self.nodes) <= MAX_NODES, f"{len(self.nodes)} nodes; give 1 to {MAX_NODES}")
        require(len(self.streams) > 0, "no stream of requests; give at least one")
        names = [node.name for node in self.nodes]
        for name in names:
            require(names.count(name) == 1, f"two nodes are named {name!r}; give each its own name")
        require(0 <= self.seed < 2**63, f"the seed is {self.seed}; give 0 to 2^63 - 1")
        traces = sum(isinstance(stream.arrivals, FromTrace) for stream in self.streams)
        require(traces <= 1, f"{traces} streams come from a trace; merge the traces into one")
        in_flight = sum(stream.in_flight_limit for stream in self.streams)
        require(
            in_flight <= MAX_REQUESTS_IN_FLIGHT,
            f"{in_flight} requests may be in flight at once; lower clients or queue_limit to {MAX_REQUESTS_IN_FLIGHT}",
        )
        for stream in self.streams:
            self._require_served(stream)
        for change in self.role_changes:
            require(change.node in names, f"a role change names the node {change.node!r}, which is not there")
            require_number("RoleChange.at_s", change.at_s, at_least=0)
            self.nodes[names.index(change.node)].require_able(change.role)

    def _require_served(self, stream: Stream) -> None:
        """There is a place for each of its requests, the longest too."""
        here = f"stream {stream.name!r}"
        nodes = [node for node in self.nodes if node.model == stream.model]
        require(len(nodes) > 0, f"{here}: no node serves the model {stream.model!r}")
        ends = [node for node in nodes if node.role is not Role.PREFILL]
        starts = [node for node in nodes if node.role is Role.PREFILL]
        whole = [node for node in nodes if node.role is Role.AGGREGATED]
        require(len(ends) > 0, f"{here}: no node decodes the model {stream.model!r}")
        require(len(starts) + len(whole) > 0, f"{here}: no node prefills the model {stream.model!r}")
        if isinstance(stream.arrivals, FromTrace):
            return
        longest = stream.isl_tokens.most + stream.osl_tokens.most
        decode = [node for node in ends if node.role is Role.DECODE] if starts else []
        for node in whole + decode:
            room = node.kv_capacity_tokens
            require(
                longest <= room,
                f"{here}: a request of {longest} tokens cannot fit into the {room} tokens of KV of node {node.name!r}; "
                "shorten the requests or leave the node out",
            )
        for node in starts:
            staging = node.staging_tokens
            require(
                staging is None or stream.isl_tokens.most <= staging,
                f"{here}: a prompt of {stream.isl_tokens.most} tokens cannot fit into the {staging} tokens of staging "
                f"of node {node.name!r}; give it more",
            )
