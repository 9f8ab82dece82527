"""The cross-vendor report as scenarios: every length and concurrency, both pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from isthmus_planner.cost import catalog, kv, memory
from isthmus_planner.cost.laws import decode_law, prefill_law
from isthmus_planner.cost.layout import Layout
from isthmus_planner.reproduce.constants import CrossFitted, CrossKnown
from isthmus_planner.reproduce.published import CrossVendor
from isthmus_planner.sim.from_cost import decode_table, prefill_table
from isthmus_planner.sim.hardware import Node, Relay, ResidentKv, Role, TransferStall
from isthmus_planner.sim.scenario import Scenario
from isthmus_planner.sim.simulate import simulate
from isthmus_planner.sim.workload import ClosedLoop, Lengths, Stream

REQUESTS_PER_CLIENT = 10
"""As serving benchmarks do by default; start and end of the run count in throughput, as theirs do."""
MAX_BATCH = 256


@dataclass(frozen=True, slots=True)
class Cell:
    """One operating point of both pairs."""

    scenario: str
    concurrency: int
    cross_e2el_s: float
    """Median."""
    single_e2el_s: float
    cross_tps: float
    """Input and output tokens per second."""
    single_tps: float

    @property
    def e2el_ratio(self) -> float:
        return self.cross_e2el_s / self.single_e2el_s

    @property
    def tps_ratio(self) -> float:
        return self.cross_tps / self.single_tps


@dataclass(frozen=True, slots=True)
class CrossVendorRun:
    cells: tuple[Cell, ...]

    def cell(self, scenario: str, concurrency: int) -> Cell:
        return next(each for each in self.cells if (each.scenario, each.concurrency) == (scenario, concurrency))

    @property
    def e2el_geometric_mean(self) -> float:
        return _geometric_mean([each.e2el_ratio for each in self.cells])

    @property
    def tps_geometric_mean(self) -> float:
        return _geometric_mean([each.tps_ratio for each in self.cells])


def run_cross_vendor(report: CrossVendor, known: CrossKnown, fitted: CrossFitted, seed: int) -> CrossVendorRun:
    pairs = {side: pair_of_nodes(report, known, fitted, side) for side in ("cross", "single")}
    intake = {"cross": fitted.cross_intake_bytes_per_s, "single": fitted.single_intake_bytes_per_s}
    cells = []
    for name, lengths in report.scenarios.items():
        for concurrency in lengths.concurrency:
            found: dict[str, tuple[float, float]] = {}
            for side, nodes in pairs.items():
                stream = Stream(
                    ClosedLoop(concurrency, report.rate_per_s),
                    REQUESTS_PER_CLIENT * concurrency,
                    Lengths.constant(lengths.isl_tokens),
                    Lengths.constant(lengths.osl_tokens),
                )
                relay = Relay(work_requests=None, host_bytes_per_s=intake[side])
                result = simulate(Scenario(nodes, (stream,), relay=relay, seed=seed)).stream
                found[side] = result.e2el_s.p50, result.total_tokens_per_s
            cross, single = found["cross"], found["single"]
            cells.append(Cell(name, concurrency, cross[0], single[0], cross[1], single[1]))
    return CrossVendorRun(tuple(cells))


def pair_of_nodes(report: CrossVendor, known: CrossKnown, fitted: CrossFitted, side: str) -> tuple[Node, Node]:
    """Prefill and decode; `side` is cross or single."""
    model, layout = catalog.model(report.model), Layout(tp=report.tp)
    sender = catalog.accelerator(report.prefill["cross" if side == "cross" else "single"])
    receiver = catalog.accelerator(report.decode)
    link = report.network_bit_per_s / 8
    stored = kv.stored_bytes_per_token(model, layout)
    constants = known.constants(known.prefill_efficiency[sender.name])
    decode = decode_law(receiver, model, layout, known.constants(known.prefill_efficiency[receiver.name]))
    prefill_node = Node(
        name="prefill",
        role=Role.PREFILL,
        kv_capacity_tokens=int(memory.fit(sender, model, layout).kv_tokens),
        prefill=prefill_table(prefill_law(sender, model, layout, constants)),
        kv_bytes_per_token=stored,
        link_bytes_per_s=link,
    )
    resident = ResidentKv(
        fitted.resident_step_s_per_token, fitted.resident_above_tokens, fitted.resident_receive_s_per_pair
    )
    decode_node = Node(
        name="decode",
        role=Role.DECODE,
        kv_capacity_tokens=int(memory.fit(receiver, model, layout).kv_tokens),
        decode=decode_table(decode, MAX_BATCH),
        kv_bytes_per_token=stored,
        link_bytes_per_s=link,
        resident_kv=resident if side == "single" else None,
        transfer_stall=TransferStall(0.0, fitted.cross_stall_s_per_token) if side == "cross" else None,
    )
    return prefill_node, decode_node


def _geometric_mean(values: list[float]) -> float:
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))
