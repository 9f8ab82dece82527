"""What goes wrong in a simulation, and when. Each fault heals itself: how is in `inflicting`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """Of a process."""

    WORKER_CRASH = "worker_crash"
    WORKER_RESTART = "worker_restart"
    PLANNER_CRASH = "planner_crash"
    INGRESS_CRASH = "ingress_crash"
    INGRESS_RESTART = "ingress_restart"
    RELAY_LOSS = "relay_loss"
    RELAY_RESTART = "relay_restart"
    PAUSE = "pause"
    """Nothing of the process runs for a while, then everything that became due, at once: SIGSTOP, SIGCONT."""

    """Of the bus."""
    BUS_OUTAGE = "bus_outage"
    BUS_RESTART = "bus_restart"
    """What is under way is lost, and each client is back when it notices."""
    BUS_PARTITION = "bus_partition"
    """A process' connection passes nothing in one direction, or both; or it is reset."""
    ROUTE_SPLIT = "route_split"
    """What one process says does not reach another, as between two servers of a cluster; one way or both."""
    SLOW_CONSUMER = "slow_consumer"
    """Subscriptions that overflow, or a client that the server cuts off."""
    PAYLOAD_LIMIT = "payload_limit"
    """The server is back with a lower limit."""
    DELAYS = "delays"
    SHED_EVENTS = "shed_events"
    REPEATED_MESSAGES = "repeated_messages"
    LINGERING_REQUESTS = "lingering_requests"

    """Of a node and its lanes."""
    SLOW_WORKER = "slow_worker"
    SLOW_NODE = "slow_node"
    LANE_LOSS = "lane_loss"
    LANE_PARTITION = "lane_partition"
    """Nothing passes between two nodes' relays, one way or both; given up after a while, as by pings."""
    CORRUPTION = "corruption"
    LATE_CHUNKS = "late_chunks"
    REPEATED_CHUNKS = "repeated_chunks"
    STAGING_FULL = "staging_full"
    KV_FULL = "kv_full"
    ENGINE_FAILURE = "engine_failure"
    """Steps fail as when memory runs out: one, or all until the engine gives up and the process with it."""


@dataclass(frozen=True)
class Planned:
    fault: Fault
    at_s: float
    lasts_s: float
    pick: int
    """Which of the candidates it hits."""
    coin: bool
    """Which of two variants, where there are two."""

    @property
    def text(self) -> str:
        return f"{self.fault} at {self.at_s:.3f} s for {self.lasts_s:.3f} s (pick {self.pick}, coin {int(self.coin)})"


CLIMATE = (Fault.LINGERING_REQUESTS, Fault.REPEATED_MESSAGES, Fault.LATE_CHUNKS)
CLIMATE_CHANCE = 0.08


def plan_faults(rng: random.Random, *, over_s: float) -> tuple[Planned, ...]:
    """From none (one run in ten) to six. A crash of a worker is as likely as any three others.

    Now and then one of the `CLIMATE` lasts for the whole run: what comes twice or late does harm only together with
    something else.
    """
    count = rng.choice((0, 1, 1, 2, 3, 4, 5, 6))
    kinds = [*Fault, Fault.WORKER_CRASH, Fault.WORKER_CRASH]
    climate = [Planned(kind, 0.01, over_s, 0, False) for kind in CLIMATE if rng.random() < CLIMATE_CHANCE]
    return tuple(
        climate
        + sorted(
            (
                Planned(
                    rng.choice(kinds),
                    rng.uniform(0.05, over_s),
                    rng.choice((rng.uniform(0.02, 0.3), rng.uniform(0.1, 3.0), rng.uniform(0.1, 3.0), 7.0)),
                    rng.randrange(1000),
                    rng.random() < 0.5,
                )
                for _ in range(count)
            ),
            key=lambda planned: planned.at_s,
        )
    )
