"""The cost model's laws and the simulator's tables say the same, as do a replica's closed form and its simulation."""

from __future__ import annotations

import pytest

from isthmus_planner.cost.constants import Constants
from isthmus_planner.cost.laws import DecodeLaw, PrefillLaw
from isthmus_planner.cost.meanfield import closed_loop
from isthmus_planner.sim.from_cost import decode_table, prefill_table
from isthmus_planner.sim.hardware import Node, Role
from isthmus_planner.sim.scenario import Scenario
from isthmus_planner.sim.simulate import simulate
from isthmus_planner.sim.workload import ClosedLoop, Lengths, Stream

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("simulator")]

DECODE = DecodeLaw(0.0035, 0.0021, 128, 4, 0.7, 1.6e-5, 1.1e-9)
PREFILL = PrefillLaw(0.0, 1.3e-5, 9e-11, 8e-11, 128, 0.0005, 0.0023, 128, 4, 0.7, 4e-6)


def test_tables_are_the_laws() -> None:
    table = decode_table(DECODE, 96)
    assert table.max_batch == 96
    for batch in (1, 2, 17, 96):
        assert table.step_s(batch, 12_345) == pytest.approx(float(DECODE.step_s(batch, 12_345)), rel=1e-12)
    prompts = prefill_table(PREFILL)
    for new, cached in ((512, 0), (512, 4096), (8192, 0), (600, 1000)):
        assert prompts.time_s(new, cached) == pytest.approx(float(PREFILL.time_s(new, cached)), rel=1e-3)


@pytest.mark.parametrize("clients", [1, 8, 64])
@pytest.mark.parametrize(("isl", "osl"), [(1024, 1024), (4096, 512)])
def test_an_aggregated_replica_goes_as_its_closed_form_says(clients: int, isl: int, osl: int) -> None:
    node = Node("a", Role.AGGREGATED, 10**7, prefill_table(PREFILL), decode_table(DECODE, 512), pass_tokens=8192)
    load = Stream(
        ClosedLoop(clients),
        max(400, 30 * clients),
        Lengths.constant(isl),
        Lengths.constant(osl),
        warmup_requests=3 * clients,
    )
    found = simulate(Scenario((node,), (load,))).stream
    # A prompt waits for the boundary, half a step, and is computed beside one step.
    said = closed_loop(DECODE, PREFILL, Constants(interference=1.0, admission_steps=1.5), clients, isl, osl)
    assert float(said.requests_per_s) == pytest.approx(found.steady_requests_per_s, rel=0.03)
    assert float(said.e2el_s) == pytest.approx(found.e2el_s.mean, rel=0.03)
    assert float(said.tpot_s) == pytest.approx(found.tpot_s.mean, rel=0.03)
