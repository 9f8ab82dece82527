"""The event-skipping simulator against the same rules taken step by step and chunk by chunk."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_planner.sim.hardware import (
    DecodeTable,
    DescriptorPosting,
    Interleave,
    NicQueue,
    Node,
    PrefillTable,
    Relay,
    ResidentKv,
    Role,
    TransferStall,
)
from isthmus_planner.sim.result import Quantiles
from isthmus_planner.sim.scenario import Mechanisms, Scenario
from isthmus_planner.sim.simulate import simulate
from isthmus_planner.sim.trace_batch import TraceBatch
from isthmus_planner.sim.workload import FromTrace, Stream
from isthmus_testing.stepwise import Request, StepwiseSimulator

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("simulator")]
"""The first simulation in a checkout compiles for some twenty CPU seconds, which one process does for all."""

# Odd figures, so that no two events fall on one instant by accident and are taken in another order.
seconds = st.floats(0.001, 0.0997).map(lambda value: value * 1.000731)


@st.composite
def node(draw: st.DrawFn, name: str, role: Role) -> Node:
    base = draw(seconds)
    decode = DecodeTable(
        tuple(base * (1 + 0.0371 * batch) for batch in range(draw(st.integers(1, 9)))),
        draw(st.sampled_from([0.0, 1.37e-6, 8.11e-5])),
    )
    return Node(
        name,
        role,
        kv_capacity_tokens=draw(st.integers(260, 1500)),
        prefill=PrefillTable(
            draw(seconds), draw(st.floats(1e-6, 1e-3)), draw(st.sampled_from([0.0, 3.3e-6])), draw(st.floats(0, 0.05))
        ),
        decode=decode,
        pass_tokens=draw(st.integers(11, 400)),
        interleave=draw(st.sampled_from(Interleave)),
        kv_bytes_per_token=draw(st.sampled_from([1.0, 1000.0])),
        staging_tokens=draw(st.sampled_from([None, 150, 400])),
        transfer_stall=draw(st.sampled_from([None, TransferStall(0.0123, 1.1e-5)])),
        descriptor_posting=draw(st.sampled_from([None, DescriptorPosting(2.3e-4, 3000.0, 1, 1.7e-7)])),
        resident_kv=draw(st.sampled_from([None, ResidentKv(3.1e-5, 177.0), ResidentKv(3.1e-5, 177.0, 4.3e-7)])),
        nic_queue=draw(st.sampled_from([None, NicQueue(9, 0.0217, 7000.0)])),
        interference=draw(st.sampled_from([0.0, 0.31, -0.2])),
    )


@st.composite
def scenario(draw: st.DrawFn) -> tuple[Scenario, list[tuple[float, int, int]]]:
    whole = draw(st.integers(0, 2))
    paired = draw(st.integers(0 if whole else 1, 2))
    nodes = [draw(node(f"a{i}", Role.AGGREGATED)) for i in range(whole)]
    nodes += [draw(node(f"p{i}", Role.PREFILL)) for i in range(paired)]
    nodes += [draw(node(f"d{i}", Role.DECODE)) for i in range(draw(st.integers(1, 2)) if paired else 0)]
    relay = Relay(
        setup_s=draw(st.sampled_from([0.0, 0.00171])),
        chunk_bytes=draw(st.sampled_from([999, 20_011])),
        burst_chunks=draw(st.integers(1, 4)),
        pace_bytes_per_s=draw(st.sampled_from([math.inf, 1.7e6, 4.1e5])),
        work_requests=draw(st.sampled_from([None, 3])),
        credit_round_trip_s=draw(st.sampled_from([0.0, 0.0043])),
        host_bytes_per_s=draw(st.sampled_from([2.9e6, 7.3e5])),
    )
    on = Mechanisms(*(draw(st.booleans()) for _ in range(5)))
    count = draw(st.integers(1, 25))
    gap, at = draw(st.sampled_from([0.001, 0.05, 1.0])), 0.0
    requests = []
    for _ in range(count):
        at += gap * draw(st.floats(0.01, 2.0))
        requests.append((at, draw(st.integers(1, 150)), draw(st.integers(1, 110))))
    stream = Stream(FromTrace(), count, overhead_s=draw(st.sampled_from([0.0, 0.0313])))
    return Scenario(tuple(nodes), (stream,), relay, on), requests


def same(found: float, expected: float) -> None:
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def same_distribution(found: Quantiles, expected: list[float]) -> None:
    assert found.count == len(expected)
    if not expected:
        return
    same(found.mean, math.fsum(expected) / len(expected))
    same(found.most, max(expected))
    ordered = sorted(expected)
    for share, value in ((0.5, found.p50), (0.9, found.p90)):
        low = ordered[max(0, math.ceil(share * len(ordered)) - 1)]
        high = ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))]
        assert low * 0.995 - 1e-8 <= value <= high * 1.005 + 1e-8, (share, ordered)


def compare(scenario: Scenario, requests: list[tuple[float, int, int]]) -> None:
    slow = StepwiseSimulator(scenario, requests)
    done: list[Request] = slow.run()
    fast = simulate(scenario, [TraceBatch.of(*(list(column) for column in zip(*requests, strict=True)))])
    stream = fast.stream
    assert stream.sent == stream.completed == len(requests) == len(done)
    assert stream.refused == 0
    same(fast.duration_s, max(request.ended_at for request in done))
    same_distribution(stream.ttft_s, [r.first_at - r.sent_at for r in done])
    same_distribution(stream.e2el_s, [r.ended_at - r.sent_at for r in done])
    same_distribution(stream.tpot_s, [(r.ended_at - r.first_at) / (r.osl - 1) for r in done if r.osl > 1])
    same_distribution(stream.itl_s, [gap for r in done for gap in r.gaps])
    same(stream.waits.kv_room_s, sum(r.granted_at - r.first_at for r in done) / len(done))
    same(stream.waits.transfer_s, sum(r.landed_at - r.granted_at for r in done) / len(done))
    same(stream.waits.seat_s, sum(r.seated_at - r.landed_at for r in done) / len(done))
    for engine, node in zip(slow.engines, fast.nodes, strict=True):
        assert engine.kv_peak == node.kv_peak_tokens
        assert engine.kv_used == engine.staging_used == 0


@given(scenario())
@settings(max_examples=120, deadline=None)
def test_skipping_steps_changes_nothing(case: tuple[Scenario, list[tuple[float, int, int]]]) -> None:
    compare(*case)
