"""The real services in virtual time give what the planner's simulator says. All cases: `make sim-agreement`."""

from __future__ import annotations

import dataclasses

import pytest

from isthmus_sim.agreement import report
from isthmus_sim.agreement.measure import Case, Compared, by_services, by_simulator
from isthmus_sim.agreement.pacing import paced

CASES = {case.name: case for case in report.cases(clients=(1, 8), per_client=2)}


@pytest.mark.parametrize("name", ["cross 1K/1K C=1", "cross 8K/1K C=1", "single 1K/1K C=1"])
def test_the_services_are_as_fast_as_the_simulator_says(name: str) -> None:
    case = CASES[name]
    compared = Compared(case, by_simulator(case, 0), by_services(case, 0))
    assert report.worst([compared]) <= report.BOUND, report.table([compared])


def test_a_pace_keeps_a_burst_from_decodes_steps_and_costs_little() -> None:
    case = dataclasses.replace(CASES["cross 8K/1K C=8"], isl_tokens=2048, osl_tokens=64, requests=16)
    (_, burst), (_, slow) = paced(case, (float("inf"), 2e9))
    assert slow.itl_p99_s < 0.5 * burst.itl_p99_s
    assert slow.e2el_p50_s < 1.5 * burst.e2el_p50_s


def test_what_differs_is_found() -> None:
    """The comparison can fail: a decode law that is 5 % slower than the simulator's."""
    case = CASES["cross 1K/1K C=1"]
    table = case.decode.decode
    assert table is not None
    slower = dataclasses.replace(
        table, a_s=tuple(1.06 * a_s for a_s in table.a_s), b_s_per_token=1.06 * table.b_s_per_token
    )
    other: Case = dataclasses.replace(case, decode=dataclasses.replace(case.decode, decode=slower))
    assert report.worst([Compared(case, by_simulator(case, 0), by_services(other, 0))]) > report.BOUND
