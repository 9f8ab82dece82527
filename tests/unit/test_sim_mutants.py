"""The bugs that are put back on purpose are still bugs of today's code, and the simulation objects to the quickest."""

from __future__ import annotations

import pytest

from isthmus_testing.sim_mutants import MUTANTS, Mutant, applied, look_for


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_its_lines_are_there_and_it_is_taken_back(mutant: Mutant) -> None:
    before = getattr(mutant.of, mutant.method)
    with applied(mutant):
        assert getattr(mutant.of, mutant.method) is not before
    assert getattr(mutant.of, mutant.method) is before


def test_a_relay_that_returns_credit_twice_is_found_by_one_of_the_first_seeds() -> None:
    assert look_for("credit-twice", 0, 5).seed is not None
