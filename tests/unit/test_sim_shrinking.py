"""A failing plan is made small, and what is printed is the plan again."""

from __future__ import annotations

import json

import pytest

from isthmus_sim.faults import Fault
from isthmus_sim.plan import Plan, draw_plan, dumps
from isthmus_sim.shrinking import kind, shrink


def busy_plan() -> Plan:
    return next(plan for plan in map(draw_plan, range(100)) if len(plan.faults) == 6)


def test_what_does_not_matter_is_dropped_and_what_is_left_still_fails() -> None:
    plan = busy_plan()
    guilty, asker = plan.faults[3], plan.asks[5].name

    def run(candidate: Plan) -> list[str]:
        hit = any(planned.fault is guilty.fault for planned in candidate.faults)
        asked = any(ask.name == asker for ask in candidate.asks)
        return ["it fails after 3.5 s"] if hit and asked else []

    small = shrink(plan, run(plan), run)
    assert [planned.fault for planned in small.plan.faults] == [guilty.fault]
    assert [ask.name for ask in small.plan.asks] == [asker]
    assert small.plan.late == ()
    assert small.plan.faults[0].lasts_s <= 0.05
    assert small.problems == ["it fails after 3.5 s"]
    assert small.tries < 150


def test_another_failure_is_not_mistaken_for_the_first() -> None:
    plan = busy_plan()
    small = shrink(plan, ["a leak"], lambda candidate: ["a leak"] if candidate == plan else ["something else"])
    assert small.plan == plan


def test_the_tries_are_bounded() -> None:
    tried: list[Plan] = []
    shrink(busy_plan(), ["x"], lambda candidate: (tried.append(candidate), ["x"])[1], max_tries=7)
    assert len(tried) == 7


def test_problems_of_one_kind_differ_in_numbers_and_ids_only() -> None:
    assert kind("p1 holds req-qSvvpC24MTCx generation 1") == kind("p0 holds req-_aaaaaaaaaa- generation 12")
    assert kind("p1 holds nothing") != kind("d1 holds nothing")


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_survives_its_file(seed: int) -> None:
    plan = draw_plan(seed)
    assert Plan.from_json(json.loads(dumps(plan))) == plan


def test_every_kind_of_fault_is_drawn() -> None:
    assert {planned.fault for seed in range(400) for planned in draw_plan(seed).faults} == set(Fault)
