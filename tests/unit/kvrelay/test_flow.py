from __future__ import annotations

import pytest

from isthmus_kvrelay.core.flow import IN_TABLE, OUT_TABLE, InInput, InState, OutInput, OutState


def test_every_living_state_can_fail_and_no_dead_one_can_do_anything() -> None:
    for out in OutState:
        over = (OutState.RETAINED, OutState.ENDED)
        assert ((out, OutInput.FAILED) in OUT_TABLE) == (out not in over)
    for into in InState:
        assert ((into, InInput.FAILED) in IN_TABLE) == (into is not InState.ENDED)
    assert not any(state is OutState.ENDED for state, _ in OUT_TABLE)
    assert not any(state is InState.ENDED for state, _ in IN_TABLE)


@pytest.mark.parametrize("table", [OUT_TABLE, IN_TABLE])
def test_every_state_is_reached_and_left(table: dict) -> None:  # type: ignore[type-arg]
    left = {state for state, _ in table}
    reached = set(table.values())
    starts = {OutState.GATED, InState.CONNECTING, InState.ATTACHED}
    assert left - starts <= reached
    assert all(state in left or state.value == "ended" for state in reached)
