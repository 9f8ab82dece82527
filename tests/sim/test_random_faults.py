"""The real services in virtual time under random load and seeded faults. What must hold is in `sim_cluster`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from isthmus_sim.faults import Fault, Planned
from isthmus_sim.simulation import simulate

BUSY_SEED = 7


def test_every_request_ends_right_and_nothing_is_left_whatever_fails(
    random_seed: int, request: pytest.FixtureRequest
) -> None:
    result = simulate(random_seed)
    if result.problems or request.config.getoption("seed", None) is not None:
        request.node.add_report_section("call", "trace", "\n".join(result.trace.lines()))
    assert not result.problems, result.report


def test_without_faults_every_client_gets_the_tokens_of_one_engine() -> None:
    result = simulate(1, faults=[], requests=40)
    assert not result.problems, result.report
    assert not [line for line in result.trace.lines() if "request.failed" in line], (
        "a worker calls failed what went well"
    )


def test_a_seed_is_the_same_run_under_any_hash_seed() -> None:
    """Many faults, so that much could differ. Separate processes: hashes and addresses are a process' own."""
    first, second = (_trace_in_a_process(BUSY_SEED, hash_seed) for hash_seed in ("1", "2"))
    assert "FAULT" in first
    assert first == second


def _trace_in_a_process(seed: int, hash_seed: str) -> str:
    program = f"from isthmus_sim.simulation import simulate; print('\\n'.join(simulate({seed}).trace.lines()))"
    environ = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


UNSEEN = (
    Fault.WORKER_CRASH,
    Fault.WORKER_RESTART,
    Fault.SLOW_WORKER,
    Fault.RELAY_LOSS,
    Fault.LANE_LOSS,
    Fault.DELAYS,
    Fault.REPEATED_MESSAGES,
    Fault.LINGERING_REQUESTS,
)


@pytest.mark.parametrize("coin", [True, False])
@pytest.mark.parametrize("fault", UNSEEN)
def test_no_client_sees_one_fault_of_a_kind_that_another_attempt_overcomes(fault: Fault, coin: bool) -> None:
    planned = [Planned(fault, 0.5, 1.0, 2, coin)]
    result = simulate(1000 + list(Fault).index(fault), faults=planned, requests=20, unseen=True)
    assert not result.problems, result.report
    assert any(line.split()[1:3] == ["FAULT", fault] for line in result.trace.lines())
