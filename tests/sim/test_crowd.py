"""Far more at once than there is room for: everyone's turn comes."""

from __future__ import annotations

import dataclasses
import random

import pytest

from isthmus_sim.load import draw
from isthmus_sim.plan import Plan, draw_plan
from isthmus_sim.simulation import run


def crowd(seed: int, requests: int) -> Plan:
    """All within 50 ms, nobody leaves, and the smallest staging, which holds one long prompt at a time."""
    plan = draw_plan(seed)
    asks = tuple(
        dataclasses.replace(ask, leaves_after_s=None, leaves_after_events=None)
        for ask in draw(random.Random(f"{seed}:crowd"), seed, requests, over_s=0.05)
    )
    return dataclasses.replace(
        plan, faults=(), asks=asks, late=(), size=dataclasses.replace(plan.size, slots=48, skew=0.0)
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_128_at_once_on_a_cluster_with_room_for_a_few_all_end_right(seed: int) -> None:
    result = run(crowd(seed, 128), unseen=True)
    assert not result.problems, result.report
    assert len([line for line in result.trace.lines() if " ended " in line]) >= 128
