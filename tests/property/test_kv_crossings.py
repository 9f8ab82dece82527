"""500 of the crossings that `make kv-forms` runs 10,000 of."""

from __future__ import annotations

import pytest

from isthmus_testing.kv_crossings import LATENT_LAYOUTS, LAYOUTS, RATIOS, run


@pytest.mark.parametrize("first", range(0, 500, 100))
def test_kv_crosses_between_any_two_forms_and_nothing_wrong_is_let_through(first: int) -> None:
    became = run(100, first=first)
    assert became["crossed"] + became["refused"] == 100
    assert became["crossed"] >= 90
    assert {layout.name for layout in (*LAYOUTS, *LATENT_LAYOUTS)} <= set(became), "no form is left out"
    assert {f"{producer}:{consumer}" for producer, consumer in RATIOS} <= set(became)
