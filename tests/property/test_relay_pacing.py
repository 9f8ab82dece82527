"""The pacer, byte for byte: what leaves in any window lies between what the rate promises and what it allows."""

from __future__ import annotations

import bisect
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_kvrelay.core.feedback import FLOOR, Aimd
from isthmus_kvrelay.core.pacer import Pacer

Send = tuple[float, int]
BURST_CHUNKS = 4
WINDOWS_S = (0.010, 0.033, 0.1, 0.5, 1.0, 3.0, 10.0)


def paced(rate: float, chunk: int, seconds: float, *, late_s: float = 0.0) -> list[Send]:
    """A sender that always has work and credit; its timers are up to `late_s` late."""
    pacer = Pacer(rate_bytes_per_s=rate, burst_bytes=BURST_CHUNKS * chunk, now_s=0.0)
    now_s, sends, lateness = 0.0, [], itertools.cycle([0.0, late_s, late_s / 3])
    while now_s < seconds:
        ready_s = pacer.ready_at_s(chunk, now_s=now_s)
        if ready_s > now_s:
            now_s = ready_s + next(lateness)
            continue
        pacer.spend(chunk, now_s=now_s)
        sends.append((now_s, chunk))
    return sends


def check_windows(sends: list[Send], *, rate: float, chunk: int, until_s: float, exact: bool) -> None:
    times = [at_s for at_s, _ in sends]
    for window_s in WINDOWS_S:
        most = least = None
        for first in range(0, len(sends), max(1, len(sends) // 400)):
            begin_s = times[first]
            if begin_s + window_s > until_s:
                break
            closed = bisect.bisect_right(times, begin_s + window_s) - first
            opened = bisect.bisect_right(times, begin_s + window_s) - bisect.bisect_right(times, begin_s)
            most, least = max(most or 0, closed * chunk), min(least if least is not None else 1 << 60, opened * chunk)
        if most is None or least is None:
            continue
        assert most <= rate * window_s + BURST_CHUNKS * chunk + 1, window_s
        slack = 0 if exact else chunk
        assert least >= 0.98 * rate * window_s - slack, window_s


@pytest.mark.parametrize("rate", [10e6, 100e6])
def test_any_window_from_10_ms_to_10_s_holds_what_the_rate_says(rate: float) -> None:
    """The chunk is below 2 % of the shortest window's bytes, so that the lower bound needs no allowance."""
    chunk = int(rate * 0.010 * 0.019)
    sends = paced(rate, chunk, 11.0)
    check_windows(sends, rate=rate, chunk=chunk, until_s=11.0, exact=True)


@given(rate=st.floats(1e6, 1e9), chunk=st.sampled_from([4096, 65_536, 262_144]), late_s=st.floats(0, 0.002))
@settings(max_examples=25, deadline=None)
def test_whatever_the_chunk_a_window_lacks_at_most_one(rate: float, chunk: int, late_s: float) -> None:
    """Late timers are made up for out of the bucket as long as they are shorter than the burst lasts."""
    seconds = min(2.0, 3_000 * chunk / rate)
    late_s = min(late_s, chunk / rate)
    sends = paced(rate, chunk, seconds, late_s=late_s)
    times = [at_s for at_s, _ in sends]
    for first in range(0, len(sends), max(1, len(sends) // 50)):
        for last in range(first, len(sends), max(1, len(sends) // 50)):
            span_s, total = times[last] - times[first], (last - first + 1) * chunk
            assert total <= rate * span_s + BURST_CHUNKS * chunk + 1
            assert total >= 0.98 * rate * span_s - 2 * chunk


@given(
    ceiling=st.sampled_from([float("inf"), 1e8]),
    steps=st.lists(st.tuples(st.floats(0.001, 2.0), st.booleans(), st.booleans()), min_size=1, max_size=60),
)
@settings(max_examples=60, deadline=None)
def test_the_rate_that_feedback_sets_stays_between_floor_and_ceiling(
    ceiling: float, steps: list[tuple[float, bool, bool]]
) -> None:
    aimd, now_s = Aimd(ceiling=ceiling, now_s=0.0), 0.0
    for gap_s, reported, above in steps:
        now_s += gap_s
        before = aimd.rate
        if reported:
            aimd.report(itl_s=0.03 if above else 0.01, target_s=0.02, measured=5e7, now_s=now_s)
            assert (aimd.rate <= before) if above else (aimd.rate >= before)
        else:
            aimd.lapse(now_s=now_s)
            assert aimd.rate >= before
        assert min(ceiling, 5e7) * FLOOR <= aimd.rate <= ceiling
