"""The fast routing over columns equals the definition, pair by pair, on any cluster and after any history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_planner.cost.online import LiveCosts, StepCosts
from isthmus_planner.routing.choose import asked, choose
from isthmus_planner.routing.filters import why_no_pair
from isthmus_planner.routing.policy import ModePolicy, Policy
from isthmus_planner.routing.scorers.total import alone_scores, pair_scores
from isthmus_planner.routing.seat import Correction
from isthmus_planner.routing.view import View
from isthmus_shared.errors import IsthmusError
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.health import LaneRate, ProcessState, RelayHeartbeat, RelayRates, Role, WorkerHeartbeat
from isthmus_shared.messages.outcomes import Outcome
from isthmus_shared.messages.route import RouteRequest
from isthmus_testing.clusters import PLANNER, ask, known, life, relay, worker
from isthmus_testing.naive_routing import naive

FORM = "bf16/f/full[0,1]h8d64"
NAMES = [f"w{index}" for index in range(7)]
NODES = ["n0", "n1", "n2"]


class Cached:
    def __init__(self, held: Mapping[Incarnation, int]) -> None:
        self._held = held

    def cached_tokens(self, prefix: Sequence[bytes]) -> Mapping[Incarnation, int]:
        return self._held


@st.composite
def beats(draw: st.DrawFn, name: str) -> WorkerHeartbeat:
    blocks = draw(st.sampled_from([40, 4000, 4000, 4000]))
    return worker(
        name,
        *draw(st.sampled_from([(Role.PREFILL,), (Role.DECODE,), (Role.PREFILL, Role.DECODE)])),
        node=draw(st.sampled_from(NODES)),
        relay=draw(st.integers(0, 9)) > 0,
        state=draw(st.sampled_from([ProcessState.READY] * 5 + [ProcessState.DRAINING])),
        fingerprint=draw(st.sampled_from(["f"] * 7 + ["g"])),
        form=draw(st.sampled_from([FORM] * 5 + ["unreadable"])),
        vendor=draw(st.sampled_from(["dear", "cheap"])),
        max_len=draw(st.sampled_from([512, 8192, 8192, 8192])),
        blocks=blocks,
        free=draw(st.sampled_from([blocks, blocks, blocks // 2, 2])),
        queued=draw(st.sampled_from([0, 300, 20_000])),
        running=draw(st.integers(0, 20)),
        prefill_rate=draw(st.sampled_from([None, 500.0, 9000.0])),
        step_s=draw(st.sampled_from([None, 0.004, 0.05])),
    )


costs = st.builds(
    LiveCosts,
    st.builds(
        StepCosts,
        st.floats(0.001, 0.05),
        st.floats(0, 1e-3),
        st.floats(0, 1e-5),
        st.floats(1e-6, 1e-3),
    ),
    st.sampled_from([0, 100]),
    st.sampled_from([0, 100]),
    st.sampled_from([0, 64, 512]),
    st.floats(1.0, 3.0),
)


def relays(node: str) -> st.SearchStrategy[RelayHeartbeat]:
    return st.builds(
        relay,
        st.just(node),
        sent=st.sampled_from([0, 10**6, 10**8]),
        received=st.sampled_from([0, 10**6, 10**8]),
        pool_free=st.sampled_from([10**5, 10**9, 10**9]),
    )


ids = st.integers(0, 30).map("r{}".format)
requests = st.builds(
    ask,
    st.sampled_from([1, 32, 100, 500, 3000, 9000]),
    name=ids,
    osl=st.sampled_from([1, 20, 2000]),
    exclude=st.lists(st.sampled_from(NAMES), max_size=1).map(tuple),
    ttft_s=st.sampled_from([None, None, 0.05, 1.0]),
    itl_s=st.sampled_from([None, None, 0.01, 0.05]),
    waited_s=st.sampled_from([0.0, 0.5]),
    prefix=st.sampled_from([(), (b"12345678",)]),
)
events = st.one_of(
    st.sampled_from(NAMES).flatmap(beats).flatmap(lambda beat: st.tuples(st.just(beat), st.none() | costs)),
    st.sampled_from(NAMES).map(lambda name: ("lost", name)),
    st.sampled_from(NODES).flatmap(relays),
    st.builds(
        lambda rate, default: RelayRates(
            lanes=(LaneRate(sender=Incarnation("relay-n0"), receiver=Incarnation("relay-n1"), bytes_per_s=rate),),
            default_bytes_per_s=default,
            valid_s=3.0,
        ),
        st.sampled_from([1e5, 1e7, 1e9]),
        st.sampled_from([None, 1e6, 1e9]),
    ),
    st.tuples(st.sampled_from(NAMES), st.builds(Correction, st.floats(0.3, 3), st.floats(0.3, 3), st.floats(0, 0.1))),
    ids.map(lambda name: Outcome(request_id=name, model="demo", isl_tokens=1, osl_tokens=40, e2el_s=1.0)),
    requests,
    requests,
    requests,
)
policies = st.builds(
    Policy,
    mode=st.sampled_from(ModePolicy),
    prices=st.sampled_from([{}, {"dear": 40.0, "w1": 5.0}]),
    slo_margin=st.sampled_from([1.0, 1.2]),
)
held = st.dictionaries(st.sampled_from(NAMES).map(life), st.integers(1, 9000), max_size=4)


def compare(request: RouteRequest, view: View, now_s: float, cached: Cached) -> None:
    wanted = asked(request, view, cached, now_s)
    expected = naive(request, wanted, view, now_s)
    try:
        found = choose(request, view, known, PLANNER, now_s, cached)
    except IsthmusError:
        assert expected is None
        return
    assert expected is not None
    assert found.score_s == pytest.approx(expected[0], rel=1e-9, abs=1e-12)
    if found.prefill is None:
        own = alone_scores(wanted, found.decode)
    else:
        crossing = view.crossing(found.prefill, found.decode, wanted.tokens, now_s)
        own = pair_scores(wanted, found.prefill, found.decode, crossing)
        assert why_no_pair(found.prefill, found.decode) is None
    assert sum(own.values()) == pytest.approx(found.score_s, rel=1e-9, abs=1e-12), "the plan is told with its own score"
    assert found.feasible == (own["targets"] == 0 and found.room)
    view.commit(found, now_s)


def happen(event: object, view: View, now_s: float, cached: Cached) -> None:
    match event:
        case RouteRequest():
            compare(event, view, now_s, cached)
        case RelayHeartbeat():
            view.relay(event, now_s)
        case RelayRates():
            view.rates(event, now_s)
        case Outcome():
            view.outcome(event, now_s)
        case ("lost", str() as name):
            view.lost(life(name))
        case (WorkerHeartbeat() as beat, None | LiveCosts() as live):
            view.beat(beat, now_s, live)
        case (str() as name, Correction() as correction):
            view.correct(life(name), correction)
        case _:
            raise AssertionError(event)


@settings(max_examples=120, deadline=None)
@given(
    policies,
    st.lists(st.sampled_from(NAMES).flatmap(beats), min_size=4, max_size=8),
    st.lists(st.sampled_from(NODES).flatmap(relays), max_size=3),
    st.lists(events, min_size=5, max_size=30),
    held,
)
def test_fast_routing_is_naive_routing(
    policy: Policy,
    first: list[WorkerHeartbeat],
    railed: list[RelayHeartbeat],
    history: list[object],
    tokens: dict[Incarnation, int],
) -> None:
    view, cached = View(policy), Cached(tokens)
    for beat in first:
        view.beat(beat, 0.0)
    for rail in railed:
        view.relay(rail, 0.0)
    for index, event in enumerate(history):
        happen(event, view, 0.1 * index, cached)
        view.check_invariants()
