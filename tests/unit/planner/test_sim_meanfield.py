"""The closed form says what the simulator says of the same nodes."""

from __future__ import annotations

import dataclasses
import math

import pytest

from isthmus_planner.sim.hardware import (
    DecodeTable,
    Node,
    PrefillTable,
    Relay,
    ResidentKv,
    Role,
    ScenarioError,
    TransferStall,
)
from isthmus_planner.sim.meanfield import Mix, Pools
from isthmus_planner.sim.scenario import Scenario
from isthmus_planner.sim.simulate import simulate
from isthmus_planner.sim.workload import ClosedLoop, Lengths, Poisson, Stream

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("simulator")]
"""The first simulation in a checkout compiles for some twenty CPU seconds, which one process does for all."""

PREFILL = PrefillTable(0.005, 1.2e-5, 1e-10, 0.004, 1e-6)
DECODE = DecodeTable(tuple(0.004 + 2e-5 * batch for batch in range(1, 257)), 1.2e-9)
SENDS = Node("p", Role.PREFILL, 10**6, PREFILL, kv_bytes_per_token=73_728, link_bytes_per_s=50e9)
SEATED = DecodeTable(DECODE.a_s[:50], 1e-9)
TAKES = Node("d", Role.DECODE, 2 * 10**6, decode=DECODE, link_bytes_per_s=50e9)


def nodes(node: Node, count: int) -> tuple[Node, ...]:
    return tuple(dataclasses.replace(node, name=f"{node.name}{number}") for number in range(count))


@pytest.mark.parametrize(
    ("prefill", "decode", "clients", "isl", "osl", "takes", "relay", "bottleneck"),
    [
        (1, 1, 1, 1024, 1024, TAKES, Relay(), "decode_time"),
        (1, 1, 32, 1024, 1024, TAKES, Relay(), "decode_time"),
        (1, 1, 200, 1024, 1024, TAKES, Relay(), "decode_time"),
        (1, 1, 8, 1024, 8192, TAKES, Relay(), "decode_time"),
        (2, 1, 64, 8192, 1024, TAKES, Relay(), "decode_time"),
        (1, 3, 128, 8192, 1024, TAKES, Relay(), "prefill"),
        (1, 1, 400, 1024, 1024, dataclasses.replace(TAKES, decode=SEATED), Relay(), "decode_seats"),
        (1, 1, 150, 1024, 1024, dataclasses.replace(TAKES, kv_capacity_tokens=100_000), Relay(), "kv_memory"),
        (1, 1, 64, 8192, 256, TAKES, Relay(pace_bytes_per_s=2e9), "transfer"),
        (1, 1, 32, 1024, 512, dataclasses.replace(TAKES, transfer_stall=TransferStall(0.006)), Relay(), "decode_time"),
        (1, 1, 64, 2048, 512, dataclasses.replace(TAKES, resident_kv=ResidentKv(4e-8, 40_000)), Relay(), "decode_time"),
    ],
)  # fmt: skip
def test_a_closed_loop_goes_as_fast_and_takes_as_long(
    prefill: int, decode: int, clients: int, isl: int, osl: int, takes: Node, relay: Relay, bottleneck: str
) -> None:
    load = Stream(
        ClosedLoop(clients),
        max(600, 30 * clients),
        Lengths.constant(isl),
        Lengths.constant(osl),
        warmup_requests=3 * clients,
    )
    scenario = Scenario(nodes(SENDS, prefill) + nodes(takes, decode), (load,), relay)
    found = simulate(scenario)
    said = Pools(SENDS, prefill, takes, decode, Mix.constant(isl, osl), relay).closed_loop(clients)
    assert said.requests_per_s == pytest.approx(found.stream.steady_requests_per_s, rel=0.025)
    assert said.e2el_s == pytest.approx(found.stream.e2el_s.mean, rel=0.025)
    assert said.bottleneck == bottleneck == found.bottleneck
    step_s = sum(n.mean_step_s * n.decode_busy for n in found.nodes) / sum(n.decode_busy for n in found.nodes)
    assert said.itl_s == pytest.approx(step_s, rel=0.04)


def test_mixed_lengths_are_weighed_by_the_steps_they_make() -> None:
    lengths = [200, 3000]
    load = Stream(ClosedLoop(24), 4000, Lengths.constant(512), Lengths.of(lengths), warmup_requests=100)
    found = simulate(Scenario((*nodes(SENDS, 1), *nodes(TAKES, 1)), (load,))).stream
    steps = [step - 1 for step in range(*lengths)]
    mean = sum(steps) / len(steps)
    squares = sum(step * step for step in steps) / len(steps)
    mix = Mix(512, mean + 1, 512, squares / mean)
    said = Pools(SENDS, 1, TAKES, 1, mix, Relay()).closed_loop(24)
    assert said.requests_per_s == pytest.approx(found.steady_requests_per_s, rel=0.025)
    assert said.itl_s == pytest.approx(found.itl_s.mean, rel=0.02)


def test_an_open_loop_holds_as_many_as_arrive_while_one_is_there() -> None:
    load = Stream(Poisson(12.0), 6000, Lengths.constant(1024), Lengths.constant(512), warmup_requests=500)
    found = simulate(Scenario((*nodes(SENDS, 1), *nodes(TAKES, 1)), (load,))).stream
    said = Pools(SENDS, 1, TAKES, 1, Mix.constant(1024, 512), Relay()).open_loop(12.0)
    assert said.e2el_s == pytest.approx(found.e2el_s.mean, rel=0.03)
    assert said.ttft_s == pytest.approx(found.ttft_s.mean, rel=0.25)


def test_half_a_node_more_brings_half_as_much_more_where_nodes_are_what_is_short() -> None:
    mix = Mix.constant(8192, 64)
    one, more = (Pools(SENDS, count, TAKES, 4, mix, Relay()).closed_loop(200) for count in (1.0, 1.5))
    assert one.bottleneck == more.bottleneck == "prefill"
    assert more.requests_per_s / one.requests_per_s == pytest.approx(1.5, rel=2e-3)
    assert math.isclose(one.prefill_load, 1.0, abs_tol=0.01)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Pools(SENDS, 0, TAKES, 1, Mix.constant(10, 10), Relay()), "prefill_nodes is 0"),
        (lambda: Pools(SENDS, 1, TAKES, 1, Mix.constant(2 * 10**6, 10), Relay()), "cannot fit"),
        (lambda: Pools(TAKES, 1, TAKES, 1, Mix.constant(10, 10), Relay()), "no prefill law"),
        (lambda: Pools(SENDS, 1, TAKES, 1, Mix.constant(8192, 64), Relay()).open_loop(9e9), "more than prefill allows"),
    ],
)
def test_what_has_no_steady_state_is_refused(make: object, said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        make()  # type: ignore[operator]
