"""One prefill and one decode worker with a relay each, a planner and an ingress: the real services, whose engines'
steps and whose lane take the time that a scenario of the planner's simulator says.

Real flows carry a sim engine's pattern, which is smaller than the model's KV: the lane is slower in proportion.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from isthmus_planner.sim.hardware import Node
from isthmus_planner.sim.hardware import Relay as Lane
from isthmus_shared.engines.config import EngineConfig, EngineKind, SimConfig
from isthmus_shared.engines.sim import SIM_HEAD_DIM, SIM_KV_HEADS, SIM_WINDOWS
from isthmus_shared.messages.health import ProcessState, Role
from isthmus_sim.agreement.costs import NodeCosts
from isthmus_sim.bucket import MemoryBucket
from isthmus_sim.fabric import SteadyLanes
from isthmus_sim.loop import world_loop
from isthmus_sim.process import Service, World
from isthmus_sim.relay import SLOT_BYTES, Relay
from isthmus_sim.services import MODEL, Planner, SimIngress, Worker
from isthmus_sim.trace import Trace

BLOCK_TOKENS = 64
START_S = 20.0
POLL_S = 0.01
LATENCY_S = 1e-5


def pattern_bytes(isl_tokens: int) -> int:
    """Of a prompt's flow between sim engines: sliding windows carry their last tokens only."""
    tokens = sum(isl_tokens if window is None else min(window, isl_tokens) for window in SIM_WINDOWS)
    return tokens * 2 * SIM_KV_HEADS * SIM_HEAD_DIM * 4  # K and V, fp32


class PacedCluster:
    """For prompts of one length. `in_flight`: requests at once, for which there is room everywhere."""

    def __init__(
        self, prefill: Node, decode: Node, lane: Lane, *, isl_tokens: int, osl_tokens: int, in_flight: int
    ) -> None:
        self.world = world = World(0, Trace())
        world.weather.delay_s = 0.0
        scale = pattern_bytes(isl_tokens) / (isl_tokens * prefill.kv_bytes_per_token)
        wire = min(lane.lane_bytes_per_s, prefill.link_bytes_per_s, decode.link_bytes_per_s)
        self.lanes = world.fabric.lanes = SteadyLanes(LATENCY_S, wire * scale)
        chunks = -(-pattern_bytes(isl_tokens) // SLOT_BYTES) + 8
        slots = 2 * chunks * in_flight
        pace = lane.pace_bytes_per_s * scale
        self.relays = [Relay(world, name, slots=slots, bytes_per_s=pace) for name in ("node-p", "node-d")]
        blocks = (-(-(isl_tokens + osl_tokens) // BLOCK_TOKENS) + 2) * in_flight
        arrived = self._arrived_since(scale)
        self.workers = [
            Worker(
                world,
                node.name,
                role,
                relay,
                kv_layout=f"nhd:{BLOCK_TOKENS}:fp32",
                kv_blocks=blocks,
                engine=_engine(node, blocks, isl_tokens + osl_tokens + 1, in_flight),
                costs=NodeCosts(node, arrived),
            )
            for node, role, relay in zip((prefill, decode), (Role.PREFILL, Role.DECODE), self.relays, strict=True)
        ]
        self.planner = Planner(world, "planner", settings={"balance_roles": False})
        self.ingress = SimIngress(
            world, "ingress", settings={"request_timeout_s": 86_400.0, "max_in_flight": 4 * in_flight}
        )
        self._bucket: asyncio.Task[None]

    @property
    def services(self) -> list[Service]:
        return [self.ingress, *self.workers, self.planner, *self.relays]

    def _arrived_since(self, scale: float) -> Callable[[], float]:
        """Bytes of the model's KV that were put onto the lane since it was last asked."""
        seen = 0.0

        def since() -> float:
            nonlocal seen
            new, seen = self.lanes.carried_bytes - seen, self.lanes.carried_bytes
            return new / scale

        return since

    async def start(self) -> None:
        self._bucket = asyncio.create_task(MemoryBucket(self.world.broker.client("bucket")).run(), name="bucket")
        for each in self.services:
            each.start()
        until_s = world_loop().time() + START_S
        while not all(each.runtime is not None and each.runtime.state is ProcessState.READY for each in self.services):
            assert world_loop().time() < until_s, "the cluster does not start"
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(2.0)  # everyone has heard everyone

    async def stop(self) -> None:
        for each in self.services:
            await each.drain()
        self._bucket.cancel()


def _engine(node: Node, blocks: int, context: int, in_flight: int) -> EngineConfig:
    return EngineConfig(
        kind=EngineKind.SIM,
        model_name=MODEL,
        kv_layout=f"nhd:{BLOCK_TOKENS}:fp32",
        kv_blocks=blocks,
        max_batch=max(256, in_flight),
        max_waiting=4 * in_flight + 16,
        prefill_chunk_tokens=node.pass_tokens,
        prefix_cache=False,
        sim=SimConfig(max_model_len_tokens=context),
    )
