"""The real services in virtual time under random load and seeded faults. What must hold is in `sim_cluster`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from isthmus_testing.sim_faults import Fault, Planned
from isthmus_testing.simulation import simulate

BUSY_SEED = 5


def test_every_request_ends_right_and_nothing_is_left_whatever_fails(
    random_seed: int, request: pytest.FixtureRequest
) -> None:
    result = simulate(random_seed)
    if result.problems or request.config.getoption("seed", None) is not None:
        request.node.add_report_section("call", "trace", "\n".join(result.trace))
    assert not result.problems, result.report


def test_without_faults_every_client_gets_the_tokens_of_one_engine() -> None:
    result = simulate(1, faults=[], requests=40)
    assert not result.problems, result.report


def test_a_seed_is_the_same_run_under_any_hash_seed() -> None:
    """Many faults, so that much could differ. Separate processes: hashes and addresses are a process' own."""
    first, second = (_trace_in_a_process(BUSY_SEED, hash_seed) for hash_seed in ("1", "2"))
    assert "FAULT" in first
    assert first == second


def _trace_in_a_process(seed: int, hash_seed: str) -> str:
    program = f"from isthmus_testing.simulation import simulate; print('\\n'.join(simulate({seed}).trace))"
    environ = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


@pytest.mark.parametrize("fault", list(Fault))
def test_each_fault_alone_is_survived(fault: Fault) -> None:
    """Twice in one run, early and late, so that both kinds of each are met."""
    planned = [Planned(fault, 0.4, 0.6, 0, told=True), Planned(fault, 1.1, 2.5, 3, told=False)]
    result = simulate(1000 + list(Fault).index(fault), faults=planned, requests=30)
    assert not result.problems, result.report
    assert any(f"FAULT        {fault}" in line for line in result.trace)
