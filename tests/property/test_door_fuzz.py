"""A short run of the fuzzers over everything that reads what others wrote; `make fuzz` runs them for long."""

from __future__ import annotations

import pytest

from isthmus_testing.door_fuzz import fuzz


@pytest.mark.parametrize("seed", [1, 2])
async def test_hostile_bytes_end_in_a_typed_error_and_leave_nothing_behind(seed: int) -> None:
    outcomes = await fuzz(0, seed=seed, rounds=120)
    for target in ("bus_message", "tenants_file", "quick_steps"):
        assert outcomes[f"{target} read"] > 0, outcomes
        assert outcomes[f"{target} refused"] > 0, outcomes
    for door in ("http", "bus"):
        assert outcomes[f"{door} 2xx"] > 0, outcomes
        assert outcomes[f"{door} 4xx"] > 0, outcomes
        assert outcomes[f"{door} 5xx"] == 0, outcomes
