"""Sixteen relays under seeded faults (`isthmus_testing.relay_storm`). `make relay-seeds` runs two thousand seeds."""

from __future__ import annotations

import pytest

from isthmus_testing.relay_storm import StormSize, run_storm


@pytest.mark.parametrize("first", [0, 10, 20])
def test_nothing_leaks_or_comes_twice_or_to_the_wrong_one_whatever_dies(first: int) -> None:
    reports = [run_storm(seed, StormSize()) for seed in range(first, first + 10)]
    assert sum(report.deaths for report in reports) > 50
    assert sum(report.delivered for report in reports) > 300
    assert sum(report.revivals for report in reports) > 0


def test_without_faults_every_flow_arrives() -> None:
    for seed in range(100, 105):
        run_storm(seed, StormSize(calm=True))


def test_two_hundred_flows_at_once_all_arrive() -> None:
    report = run_storm(7, StormSize(flows=200, total_slots=128, at_once=True, calm=True))
    assert report.delivered >= 200


def test_a_thousand_flows_at_once_come_to_rest_through_faults() -> None:
    report = run_storm(8, StormSize(flows=1_000, total_slots=512, at_once=True))
    assert report.peak_flows == 1_000
    assert report.deaths > 50
