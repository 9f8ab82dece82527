"""DeepSeek-R1 on one fast and two slow servers: alone, side by side, and the fast one prefilling for the slow ones."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from isthmus_planner.cost import catalog, kv, memory
from isthmus_planner.cost.laws import decode_law, prefill_law
from isthmus_planner.cost.layout import Layout
from isthmus_planner.cost.profiles import AcceleratorProfile
from isthmus_planner.reproduce.constants import DeepSeekConstants
from isthmus_planner.reproduce.published import DeepSeek
from isthmus_planner.sim.from_cost import decode_table, prefill_table
from isthmus_planner.sim.hardware import Interleave, Node, Relay, Role
from isthmus_planner.sim.scenario import Scenario
from isthmus_planner.sim.simulate import simulate
from isthmus_planner.sim.workload import ClosedLoop, Lengths, Stream

REQUESTS_PER_CLIENT = 10
WARMUP_PER_CLIENT = 2
MAX_BATCH = 64
PASS_TOKENS = 1 << 16
"""A prompt is computed in one pass."""


@dataclass(frozen=True, slots=True)
class DeepSeekRun:
    """Output tokens per second."""

    fast_alone: float
    slow_alone: float
    balanced: float
    """The sum of three servers that work alone, which is how the published figure is made up."""
    disaggregated: float


def run_deepseek(report: DeepSeek, constants: DeepSeekConstants, interference: float, seed: int) -> DeepSeekRun:
    fast = catalog.accelerator(report.fast)
    like = catalog.accelerator(constants.assumed.scale_up_as)
    slow = dataclasses.replace(
        catalog.accelerator(report.slow),
        scale_up_bytes_per_s=like.scale_up_bytes_per_s,
        nic_bits_per_s=like.nic_bits_per_s,
    )
    maker = _Maker(report, constants, interference)
    servers = 1 + report.slow_servers
    alone = {
        profile.name: maker.rate((maker.node("alone", profile, Role.AGGREGATED),), 1, seed) for profile in (fast, slow)
    }
    pool = (
        maker.node("prefill", fast, Role.PREFILL),
        *(maker.node(f"decode-{index}", slow, Role.DECODE) for index in range(report.slow_servers)),
    )
    return DeepSeekRun(
        fast_alone=alone[fast.name],
        slow_alone=alone[slow.name],
        balanced=alone[fast.name] + report.slow_servers * alone[slow.name],
        disaggregated=maker.rate(pool, servers, seed),
    )


@dataclass(frozen=True, slots=True)
class _Maker:
    report: DeepSeek
    constants: DeepSeekConstants
    interference: float

    def node(self, name: str, profile: AcceleratorProfile, role: Role) -> Node:
        model, layout = catalog.model(self.report.model), Layout(tp=self.report.tp)
        known = self.constants.known.constants(self.constants.known.prefill_efficiency)
        prefill = prefill_table(prefill_law(profile, model, layout, known))
        decode = decode_table(decode_law(profile, model, layout, known), MAX_BATCH)
        return Node(
            name=name,
            role=role,
            kv_capacity_tokens=int(memory.fit(profile, model, layout).kv_tokens),
            prefill=None if role is Role.DECODE else prefill,
            decode=None if role is Role.PREFILL else decode,
            pass_tokens=PASS_TOKENS,
            interleave=Interleave.PREFILL_FIRST,
            interference=self.interference,
            kv_bytes_per_token=kv.stored_bytes_per_token(model, layout),
            link_bytes_per_s=profile.need("nic_bits_per_s", "a transfer") / 8,
        )

    def rate(self, nodes: tuple[Node, ...], servers: int, seed: int) -> float:
        assumed = self.constants.assumed
        clients = assumed.clients_per_server * servers
        stream = Stream(
            ClosedLoop(clients),
            REQUESTS_PER_CLIENT * clients,
            Lengths.constant(assumed.isl_tokens),
            Lengths.constant(assumed.osl_tokens),
            warmup_requests=WARMUP_PER_CLIENT * clients,
        )
        scenario = Scenario(nodes, (stream,), relay=Relay(work_requests=None), seed=seed)
        return simulate(scenario).stream.steady_output_tokens_per_s
