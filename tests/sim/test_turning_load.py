"""A load that turns, on the real services in virtual time. `make roles` runs it at full length (docs/roles.md)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from isthmus_sim.load import answers_of_one_engine
from isthmus_sim.turning import Scenario, Told, turn

SHORT = Scenario(prefill=3, decode=1, rate_per_s=0.7, before_s=60.0, after_s=100.0, scale=8)
"""An eighth of the lengths, at eight times the costs: 1K/128 turns into 128/1K."""
WITHIN_S = 60.0


def dropped(told: Told) -> list[str]:
    return [outcome.request_text for outcome in told.unfinished]


async def _check_tokens(told: Told) -> None:
    asked = [outcome for outcome in told.outcomes if outcome.ask.sampling.seed % 7 == 0]
    wanted = await answers_of_one_engine([replace(outcome.ask, leaves_after_s=None) for outcome in asked])
    for outcome in asked:
        assert outcome.tokens == wanted[outcome.ask.name][0]


def test_roles_follow_a_load_that_turns_within_a_minute_and_every_stream_goes_on() -> None:
    told = turn(SHORT)
    assert told.problems == []
    assert dropped(told) == []
    turned_s, settled_s = SHORT.before_s, SHORT.before_s + WITHIN_S
    assert [c for c in told.changes if c[0] < turned_s] == [], "3:1 is right for long prompts"
    assert (told.seconds[-1].prefill, told.seconds[-1].decode) == (1, 3)
    assert all(turned_s < at_s <= settled_s for at_s, _, _ in told.changes)
    assert [to for _, _, to in told.changes] == ["decode", "decode"]
    good, all_ = told.good(settled_s, SHORT.lasts_s)
    assert good >= 0.95 * all_ > 10

    stays = turn(replace(SHORT, balance=False))
    assert dropped(stays) == []
    good_there, all_there = stays.good(settled_s, SHORT.lasts_s)
    assert all_there == all_, "the same load"
    assert good_there <= 0.5 * all_there, "or following would be worth nothing"


async def test_a_stream_that_runs_through_role_changes_has_the_tokens_of_one_engine() -> None:
    """Virtual time needs a loop of its own, hence the thread."""
    told = await asyncio.to_thread(turn, replace(SHORT, before_s=20.0, after_s=50.0))
    assert told.changes, "nothing changed while the streams ran"
    await _check_tokens(told)


@pytest.mark.parametrize("period_s", [16.0, 40.0])
def test_roles_do_not_flap_when_the_mix_oscillates(period_s: float) -> None:
    told = turn(replace(SHORT, before_s=0.0, after_s=240.0, period_s=period_s, rate_per_s=0.6))
    assert dropped(told) == []
    back_and_forth = {worker for _, worker, _ in told.changes}
    assert len(told.changes) <= len(back_and_forth) + 2, told.changes
