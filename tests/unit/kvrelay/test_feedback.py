from __future__ import annotations

import itertools
import math

import pytest

from isthmus_kvrelay.core.feedback import DECREASE, HOLD_S, MAX_GAP_S, RECOVERY_S, STALE_S, Aimd


def report(aimd: Aimd, now_s: float, *, above: bool, measured: float = 40.0) -> None:
    aimd.report(itl_s=0.03 if above else 0.01, target_s=0.02, measured=measured, now_s=now_s)


def test_a_report_above_the_target_cuts_the_rate_by_a_factor_once_per_hold() -> None:
    aimd = Aimd(ceiling=100.0, now_s=0.0)
    report(aimd, 1.0, above=True)
    report(aimd, 1.0 + HOLD_S / 2, above=True)
    assert aimd.rate == pytest.approx(100 * DECREASE)
    report(aimd, 1.0 + HOLD_S, above=True)
    assert aimd.rate == pytest.approx(100 * DECREASE**2)


def test_good_reports_bring_it_back_by_equal_steps_up_to_the_ceiling() -> None:
    aimd, now_s = Aimd(ceiling=100.0, now_s=0.0), 1.0
    report(aimd, now_s, above=True)
    rates = []
    while aimd.rate < 100:
        now_s += 0.1
        report(aimd, now_s, above=False)
        rates.append(aimd.rate)
    steps = [after - before for before, after in itertools.pairwise(rates[:-1])]
    assert steps == pytest.approx([100 * 0.1 / RECOVERY_S] * len(steps))
    assert now_s - 1.0 <= (1 - DECREASE) * RECOVERY_S + 0.1


def test_silence_counts_as_good_after_a_while() -> None:
    aimd = Aimd(ceiling=100.0, now_s=0.0)
    report(aimd, 1.0, above=True)
    cut = aimd.rate
    aimd.lapse(now_s=1.0 + STALE_S / 2)
    assert aimd.rate == cut
    again_s = aimd.look_again_s()
    assert again_s == 1.0 + STALE_S
    aimd.lapse(now_s=again_s)
    assert aimd.rate == pytest.approx(cut + 100 * MAX_GAP_S / RECOVERY_S)


def test_without_a_ceiling_the_measured_rate_is_what_is_cut_and_twice_of_it_sets_free_again() -> None:
    aimd, now_s = Aimd(ceiling=math.inf, now_s=0.0), 1.0
    report(aimd, now_s, above=True, measured=0.0)
    assert math.isinf(aimd.rate), "a lane that sends nothing is not the cause"
    report(aimd, now_s, above=True, measured=40.0)
    assert aimd.rate == pytest.approx(40 * DECREASE)
    while math.isfinite(aimd.rate):
        assert aimd.rate < 80
        now_s += 0.1
        report(aimd, now_s, above=False)
    assert now_s < 1.0 + 2 * RECOVERY_S


def test_a_lower_ceiling_holds_at_once_and_a_higher_one_is_grown_into_after_a_cut() -> None:
    aimd = Aimd(ceiling=100.0, now_s=0.0)
    aimd.set_ceiling(50.0, now_s=1.0)
    assert aimd.rate == 50
    report(aimd, 2.0, above=True)
    aimd.set_ceiling(100.0, now_s=2.0)
    assert aimd.rate == pytest.approx(50 * DECREASE)
