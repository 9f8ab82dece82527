"""The real services in virtual time under random load and seeded faults. What must hold is in `sim_cluster`."""

from __future__ import annotations

import pytest

from isthmus_testing.simulation import simulate


def test_every_request_ends_right_and_nothing_is_left_whatever_fails(
    random_seed: int, request: pytest.FixtureRequest
) -> None:
    result = simulate(random_seed)
    if result.problems or request.config.getoption("seed", None) is not None:
        request.node.add_report_section("call", "trace", "\n".join(result.trace))
    assert not result.problems, result.report
