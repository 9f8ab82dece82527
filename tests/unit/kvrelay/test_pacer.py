from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from isthmus_kvrelay.core.pacer import Pacer


def test_a_full_bucket_sends_its_burst_at_once_and_then_at_the_rate() -> None:
    pacer = Pacer(rate_bytes_per_s=100, burst_bytes=50, now_s=0)
    pacer.spend(50, now_s=0)
    assert pacer.ready_at_s(10, now_s=0) == pytest.approx(0.1)
    assert pacer.ready_at_s(10, now_s=0.1) == 0.1


def test_idle_time_saves_no_more_than_the_burst() -> None:
    pacer = Pacer(rate_bytes_per_s=100, burst_bytes=50, now_s=0)
    pacer.spend(50, now_s=1000)
    assert pacer.ready_at_s(50, now_s=1000) == pytest.approx(1000.5)


def test_an_infinite_rate_never_waits() -> None:
    pacer = Pacer(rate_bytes_per_s=math.inf, burst_bytes=50, now_s=0)
    for _ in range(10):
        assert pacer.ready_at_s(50, now_s=7) == 7
        pacer.spend(50, now_s=7)


def test_a_new_rate_counts_from_when_it_is_set() -> None:
    pacer = Pacer(rate_bytes_per_s=100, burst_bytes=50, now_s=0)
    pacer.spend(50, now_s=0)
    pacer.set_rate(1, now_s=0.2)
    assert pacer.ready_at_s(30, now_s=0.2) == pytest.approx(10.2)


def test_spending_before_it_is_ready_is_a_bug() -> None:
    pacer = Pacer(rate_bytes_per_s=100, burst_bytes=50, now_s=0)
    pacer.spend(50, now_s=0)
    with pytest.raises(AssertionError):
        pacer.spend(1, now_s=0)


@given(
    rate=st.floats(1, 1e10),
    start_s=st.floats(0, 1e6),
    steps=st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 3)), min_size=1, max_size=30),
)
@example(rate=9577627420.0, start_s=524285.0, steps=[(480, 3.0), (1000, 0.0)])  # less than the clock resolves
def test_no_window_holds_more_than_rate_times_time_plus_burst(
    rate: float, start_s: float, steps: list[tuple[int, float]]
) -> None:
    pacer = Pacer(rate_bytes_per_s=rate, burst_bytes=1000, now_s=start_s)
    now_s, sends = start_s, []
    for size, idle_s in steps:
        now_s = max(now_s + idle_s, pacer.ready_at_s(size, now_s=now_s + idle_s))
        while (ready_s := pacer.ready_at_s(size, now_s=now_s)) > now_s:
            now_s = ready_s
        pacer.spend(size, now_s=now_s)
        sends.append((now_s, size))
    rounding = 1 + rate * start_s * 1e-15
    for first in range(len(sends)):
        for last in range(first, len(sends)):
            total = sum(size for _, size in sends[first : last + 1])
            assert total <= rate * (sends[last][0] - sends[first][0]) + 1000 + rounding * len(sends)
