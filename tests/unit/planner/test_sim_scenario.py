"""What cannot be simulated is refused by name."""

from __future__ import annotations

import dataclasses
import math

import pytest

from isthmus_planner.sim.hardware import DecodeTable, Node, PrefillTable, Relay, Role, ScenarioError
from isthmus_planner.sim.scenario import RoleChange, Scenario
from isthmus_planner.sim.simulate import simulate
from isthmus_planner.sim.trace_batch import TraceBatch
from isthmus_planner.sim.workload import ClosedLoop, FromTrace, Lengths, Poisson, PrefixHits, Stream

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("simulator")]
"""The first simulation in a checkout compiles for some twenty CPU seconds, which one process does for all."""

NODE = Node("a0", Role.AGGREGATED, 5000, PrefillTable(0.01, 1e-5), DecodeTable((0.01, 0.011), 1e-9))
STREAM = Stream(ClosedLoop(2), 10)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PrefillTable(-1.0, 1e-5), "base_s is -1"),
        (lambda: PrefillTable(0.0, 0.0), "takes no time"),
        (lambda: PrefillTable(math.nan, 1e-5), "base_s is nan"),
        (lambda: DecodeTable((), 1e-9), "a_s is empty"),
        (lambda: DecodeTable((0.1, math.nan), 1e-9), "batch 2 is nan"),
        (lambda: DecodeTable((0.1,), -1e-9), "b_s_per_token is -1e-09"),
        (lambda: dataclasses.replace(NODE, link_bytes_per_s=-1.0), "'a0': link_bytes_per_s is -1"),
        (lambda: dataclasses.replace(NODE, decode=None), "'a0' in the role 'aggregated' has no decode law"),
        (lambda: dataclasses.replace(NODE, name=""), "no name"),
        (lambda: Relay(pace_bytes_per_s=0), "pace_bytes_per_s is 0"),
        (lambda: Relay(pace_bytes_per_s=math.nan), "pace_bytes_per_s is nan"),
        (lambda: Lengths(()), "no figures"),
        (lambda: Lengths.uniform(9, 3), "quantiles fall"),
        (lambda: Lengths.constant(0), "0 tokens"),
        (lambda: Lengths.of([]), "no lengths"),
        (lambda: Poisson(math.inf), "infinite"),
        (lambda: PrefixHits(1.5, 0.5), "probability is 1.5"),
        (lambda: dataclasses.replace(STREAM, warmup_requests=10), "all 10 requests are warm-up"),
        (lambda: Scenario((), (STREAM,)), "0 nodes"),
        (lambda: Scenario((NODE,), ()), "no stream"),
        (lambda: Scenario((NODE, NODE), (STREAM,)), "two nodes are named 'a0'"),
        (lambda: Scenario((NODE,), (dataclasses.replace(STREAM, model="x"),)), "no node serves the model 'x'"),
        (lambda: Scenario((dataclasses.replace(NODE, role=Role.DECODE),), (STREAM,)), "no node prefills"),
        (lambda: Scenario((dataclasses.replace(NODE, role=Role.PREFILL),), (STREAM,)), "no node decodes"),
        (
            lambda: Scenario((NODE,), (dataclasses.replace(STREAM, osl_tokens=Lengths.constant(4000)),)),
            "5024 tokens cannot fit into the 5000 tokens of KV of node 'a0'",
        ),
        (lambda: Scenario((NODE,), (STREAM,), role_changes=(RoleChange(1.0, "b", Role.DECODE),)), "'b'"),
        (lambda: Scenario((NODE,), (STREAM,), seed=-1), "seed is -1"),
        (lambda: Scenario((NODE,), (dataclasses.replace(STREAM, arrivals=ClosedLoop(10**7)),)), "in flight"),
        (lambda: simulate(Scenario((NODE,), (dataclasses.replace(STREAM, arrivals=FromTrace()),))), "FromTrace"),
        (lambda: simulate(Scenario((NODE,), (STREAM,)), [TraceBatch.of([0.0], [1], [1])]), "FromTrace"),
        (lambda: simulate(Scenario((NODE,), (dataclasses.replace(STREAM, arrivals=FromTrace()),)), []), "is empty"),
    ],
)
def test_it_says_what_is_wrong(make: object, said: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        make()  # type: ignore[operator]
    assert said in str(caught.value)
