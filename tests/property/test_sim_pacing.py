"""The simulator's closed forms against the relay core's own pacer and credit, chunk by chunk."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_kvrelay.core.credit import Credits
from isthmus_kvrelay.core.pacer import Pacer
from isthmus_planner.sim.decode_run import steps_s, steps_to
from isthmus_planner.sim.hardware import Relay
from isthmus_planner.sim.pacing import level_after, level_at, send_s


@given(
    chunk=st.integers(1, 10**6),
    burst_chunks=st.integers(1, 6),
    rate=st.one_of(st.just(math.inf), st.floats(1e3, 1e9)),
    wire=st.floats(1e3, 1e9),
    flows=st.lists(st.tuples(st.floats(0, 100), st.floats(0.0001, 40.0)), min_size=1, max_size=8),
)
@settings(max_examples=400, deadline=None)
def test_flows_leave_when_the_cores_pacer_lets_them(
    chunk: int, burst_chunks: int, rate: float, wire: float, flows: list[tuple[float, float]]
) -> None:
    burst = chunk * burst_chunks
    pacer = Pacer(rate_bytes_per_s=rate, burst_bytes=burst, now_s=0.0)
    now, level, level_now = 0.0, float(burst), 0.0
    for idle, chunks in flows:
        size = max(1, int(chunks * chunk))
        now += idle * chunk / wire
        level = level_at(level, level_now, now, rate, burst)
        takes = send_s(float(size), float(chunk), level, rate, wire)
        left, free = size, now
        while left:
            sends = min(left, chunk)
            free = max(free, pacer.ready_at_s(sends, now_s=free))
            pacer.spend(sends, now_s=free)
            departed, free = free, free + sends / wire
            left -= sends
        # The core lets a chunk go half a byte early, rather than wait for what a clock cannot resolve.
        early = 0.0 if math.isinf(rate) else 0.5 / rate
        assert free - 1e-9 * max(1.0, free) - early <= now + takes <= free + early + 1e-9 * max(1.0, free)
        level = level_after(float(size), float(chunk), level, rate, wire, float(burst))
        level_now = departed
        if not math.isinf(rate):
            held = burst - pacer.ready_at_s(burst, now_s=departed) * rate + departed * rate
            assert level == pytest.approx(held, abs=1.0 + 1e-6 * burst)
            level = max(0.0, held)
        now = free


@given(
    window=st.integers(1, 40),
    chunk=st.integers(1000, 10**6),
    round_trip=st.floats(1e-5, 1e-2),
    wire=st.floats(1e6, 1e10),
)
@settings(max_examples=100, deadline=None)
def test_a_window_of_credit_carries_what_the_closed_form_says(
    window: int, chunk: int, round_trip: float, wire: float
) -> None:
    """Chunk by chunk with the core's accounts: each grant is consumed a round trip after it was used."""
    credits, chunks = Credits(), 60 * window
    back: deque[float] = deque()
    now = first_done = 0.0
    for number in range(chunks):
        if credits.work_requests.in_flight == window:
            now = max(now, back.popleft())
            credits.consume_chunk(chunk, 0)
        credits.grant_chunk(chunk, 0)
        credits.work_requests.check_in_flight(min(number + 1, window))
        back.append(now + round_trip)
        now += chunk / wire
        if number == window - 1:
            first_done = max(now, back[0])
    relay = Relay(chunk_bytes=chunk, work_requests=window, credit_round_trip_s=round_trip, host_bytes_per_s=wire)
    carried = (chunks - window) * chunk / max(now - first_done, 1e-12)
    assert carried == pytest.approx(relay.lane_bytes_per_s, rel=2.5 / 59 + 1e-6)


@given(
    a=st.floats(1e-4, 0.1),
    b=st.sampled_from([0.0, 1e-9, 3e-7]),
    c=st.sampled_from([0.0, 2e-8]),
    over=st.floats(0, 60_000),
    batch=st.integers(1, 300),
    tokens=st.integers(1, 90_000),
    steps=st.integers(1, 900),
    part=st.floats(0.01, 1.0),
)
@settings(max_examples=300, deadline=None)
def test_a_runs_closed_form_is_the_sum_of_its_steps_and_its_inverse_the_next_boundary(
    a: float, b: float, c: float, over: float, batch: int, tokens: int, steps: int, part: float
) -> None:
    ends, now, held = [], 0.0, tokens
    for _ in range(steps):
        now += a + b * held + c * max(0.0, held - over)
        held += batch
        ends.append(now)
    law = (a, b, c, over, float(batch), float(tokens))
    assert steps_s(float(steps), *law) == pytest.approx(now, rel=1e-12)
    work = now * part
    first = next(number for number, end in enumerate(ends, 1) if end >= work * (1 - 1e-12))
    found = steps_to(work, *law)
    assert found in (first, first + 1)
    assert steps_s(found, *law) >= work
    assert steps_s(found - 1, *law) < work
