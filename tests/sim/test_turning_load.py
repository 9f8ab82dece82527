"""A load that turns, on the real services in virtual time. `make roles` runs it at full length (docs/roles.md)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from isthmus_sim.load import answers_of_one_engine
from isthmus_sim.turning import Scenario, Told, turn

SHORT = Scenario(prefill=3, decode=1, rate_per_s=0.7, before_s=30.0, after_s=75.0, scale=16)
"""A sixteenth of the lengths, at sixteen times the costs: 512/64 turns into 64/512."""
WITHIN_S = 60.0


def dropped(told: Told) -> list[str]:
    return [outcome.request_text for outcome in told.unfinished]


async def wrong_tokens(told: Told) -> list[str]:
    asked = [outcome for outcome in told.outcomes if outcome.ask.sampling.seed % 4 == 0]
    wanted = await answers_of_one_engine([outcome.ask for outcome in asked], eos_chance=0.0)
    return [outcome.request_text for outcome in asked if outcome.tokens != wanted[outcome.ask.name][0]]


@pytest.mark.slow
def test_roles_follow_a_load_that_turns_within_a_minute_and_every_stream_goes_on() -> None:
    told = turn(SHORT)
    assert told.problems == []
    assert dropped(told) == []
    assert asyncio.run(wrong_tokens(told)) == []
    turned_s, settled_s = SHORT.before_s, SHORT.before_s + WITHIN_S
    assert [change for change in told.changes if change[0] < turned_s] == [], "3:1 is right for long prompts"
    assert (told.seconds[-1].prefill, told.seconds[-1].decode) == (1, 3)
    assert all(turned_s < at_s <= settled_s for at_s, _, _ in told.changes)
    assert [to for _, _, to in told.changes] == ["decode", "decode"]
    good, all_ = told.good(settled_s, SHORT.lasts_s)
    assert good >= 0.9 * all_ > 5

    stays = turn(replace(SHORT, balance=False))
    assert dropped(stays) == []
    good_there, all_there = stays.good(settled_s, SHORT.lasts_s)
    assert all_there == all_, "the same load"
    assert good_there <= 0.7 * good, "or following would be worth nothing"


@pytest.mark.slow
def test_roles_do_not_flap_when_the_mix_oscillates() -> None:
    told = turn(replace(SHORT, before_s=0.0, after_s=150.0, period_s=30.0, rate_per_s=0.6))
    assert dropped(told) == []
    changed = {worker for _, worker, _ in told.changes}
    assert len(told.changes) <= len(changed) + 1, told.changes
