from __future__ import annotations

import dataclasses
import json

import pytest

from isthmus_planner.reproduce.claims import cross_vendor_checks, deepseek_checks
from isthmus_planner.reproduce.constants import MECHANISMS, constants
from isthmus_planner.reproduce.published import published
from isthmus_planner.reproduce.report import INTERFERENCE, Reproduction, reproduce, reproduction_bytes


@pytest.fixture(scope="module")
def found() -> Reproduction:
    return reproduce()


def test_every_published_ordering_ratio_and_mean_comes_out_with_one_set_of_constants(found: Reproduction) -> None:
    assert [f"{check.case}: {check.says}" for check in found.checks if not check.holds] == []
    assert max(abs(check.error) for check in found.checks if check.error is not None and check.case != "all") <= 0.08
    assert found.run.e2el_geometric_mean == pytest.approx(0.92, rel=0.02)
    assert found.run.tps_geometric_mean == pytest.approx(1.10, rel=0.02)


def test_the_deepseek_figures_come_out_by_the_stated_workload(found: Reproduction) -> None:
    run = found.deepseek
    assert (run.fast_alone, run.slow_alone, run.disaggregated) == pytest.approx((105.16, 30.42, 253.59), rel=0.05)
    assert run.balanced == pytest.approx(run.fast_alone + 2 * run.slow_alone)


def test_every_fitted_mechanism_is_needed_for_some_statement(found: Reproduction) -> None:
    assert [each.mechanism for each in found.ablations] == list(MECHANISMS)
    for each in found.ablations:
        assert each.lost, each.mechanism
        assert each.held + len(each.lost) == len(found.checks)
    bare = found.deepseek_without_interference
    assert bare.slow_alone > 30.42 * 1.05, INTERFERENCE


def test_fewer_constants_are_fitted_than_figures(found: Reproduction) -> None:
    assert (found.fitted, found.numbers, found.ordered) == (6, 11, 23)


def test_a_simulation_that_says_otherwise_is_not_met(found: Reproduction) -> None:
    report = published().cross_vendor
    for scenario, concurrency, field, factor, lost in (
        ("1K/1K", 8, "cross_e2el_s", 1.05, "parity at every C"),
        ("1K/8K", 4, "cross_e2el_s", 1.1, "cross ahead from C = 4"),
        ("8K/1K", 16, "cross_e2el_s", 0.9, "single ahead for C = 1 to 16"),
        ("8K/1K", 32, "cross_tps", 0.9, "crossover at C = 32"),
        ("8K/1K", 256, "cross_tps", 0.9, "cross above 12,000 tok/s"),
        ("8K/1K", 256, "single_tps", 1.2, "single below 10,000 tok/s"),
        ("8K/8K", 32, "single_e2el_s", 0.85, "E2EL 0.57 at C = 32"),
        ("8K/8K", 8, "cross_e2el_s", 1.2, "cross clearly ahead from C = 8"),
    ):
        cells = tuple(
            dataclasses.replace(cell, **{field: getattr(cell, field) * factor})
            if (cell.scenario, cell.concurrency) == (scenario, concurrency)
            else cell
            for cell in found.run.cells
        )
        checks = cross_vendor_checks(report, dataclasses.replace(found.run, cells=cells))
        assert lost in {check.says for check in checks if not check.holds}


def test_a_deepseek_figure_off_by_more_than_five_percent_is_not_met(found: Reproduction) -> None:
    off = dataclasses.replace(found.deepseek, slow_alone=30.42 * 1.06)
    checks = deepseek_checks(published().deepseek, off)
    assert [check.holds for check in checks] == [True, False, True, True]


def test_json_is_the_same_for_the_same_seed_and_says_what_was_fitted(found: Reproduction) -> None:
    written = reproduction_bytes(found)
    again = dataclasses.replace(reproduce(ablations=False), ablations=found.ablations)
    assert written == reproduction_bytes(again)
    fields = json.loads(written)
    assert fields["cross_vendor"]["fitted"].keys() == {f.name for f in dataclasses.fields(constants().cross_fitted)}
    assert "not a proven cause" in fields["caution"]
    assert fields["deepseek"]["assumed"]["isl_tokens"] == 16384


def test_a_mechanism_that_is_not_there_cannot_be_switched_off() -> None:
    with pytest.raises(KeyError):
        constants().cross_fitted.without("magic")
