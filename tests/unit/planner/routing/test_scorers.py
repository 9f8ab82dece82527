"""Each scorer by figures that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus_planner.cost.online import LiveCosts, StepCosts
from isthmus_planner.cost.speeds import CostConstants, Pending
from isthmus_planner.routing.ask import Ask, Crossing, ask_of
from isthmus_planner.routing.policy import Policy, Weights
from isthmus_planner.routing.scorers import itl, price, residents, room, targets, ttft
from isthmus_planner.routing.scorers.total import alone_scores, pair_scores
from isthmus_planner.routing.seat import Correction, Seat, Targets, seat_of
from isthmus_shared.messages.health import Role
from isthmus_testing.clusters import ask as request
from isthmus_testing.clusters import life, worker

COSTS = LiveCosts(StepCosts(0.01, 0.001, 1e-6, 1e-4), 100, 100, 256, 1.0)
CONSTANTS = CostConstants()


def seat(*roles: Role, queued: int = 0, running: int = 0, free: int = 1000, **more: object) -> Seat:
    beat = worker("w", *(roles or (Role.PREFILL,)), queued=queued, running=running, free=free)
    return seat_of(beat, CONSTANTS, live=COSTS, **more)  # type: ignore[arg-type]


def wanted(isl: int = 1000, **more: object) -> Ask:
    policy = more.pop("policy", Policy(slo_margin=1.0))
    cached = more.pop("cached", {})
    assert isinstance(policy, Policy)
    return ask_of(request(isl, **more), policy, cached, 100.0)  # type: ignore[arg-type]


def test_ttft_is_the_queue_and_the_prompt_in_whole_chunks() -> None:
    own_s = 4 * 0.01 + 1000 * 1e-4
    assert ttft.ttft_s(wanted(), seat()) == pytest.approx(own_s)
    queued = seat(queued=512)
    assert ttft.ttft_s(wanted(), queued) == pytest.approx(own_s + 2 * 0.01 + 512 * 1e-4)


def test_what_is_cached_is_not_computed_but_one_token_always_is() -> None:
    half = wanted(cached={life("w"): 744})
    assert ttft.ttft_s(half, seat()) == pytest.approx(0.01 + 256 * 1e-4)
    assert ttft.saved_s(half, seat()) == pytest.approx(3 * 0.01 + 744 * 1e-4)
    whole = wanted(cached={life("w"): 1000})
    assert ttft.ttft_s(whole, seat()) == pytest.approx(0.01 + 1e-4)


def test_decoding_costs_every_expected_token_and_no_more_than_the_request_may_have() -> None:
    decode = seat(Role.DECODE, running=3)
    step_s = 0.01 + 4 * 0.001 + 1000 * 1e-6
    assert itl.decoding_s(wanted(osl=1000), decode) == pytest.approx(100 * step_s), "100 are usual"
    assert itl.decoding_s(wanted(osl=16), decode) == pytest.approx(16 * step_s)


def test_everyone_on_the_decode_worker_counts_and_only_decoders_on_the_prefill_worker_do() -> None:
    alone, crowd = seat(Role.DECODE), seat(Role.DECODE, running=10)
    each_s = 0.5 * 100 * (0.001 + 1000 * 1e-6)
    assert residents.by_joining_s(wanted(osl=1000), alone) == 0
    assert residents.by_joining_s(wanted(osl=1000), crowd) == pytest.approx(10 * each_s)
    assert residents.by_prefill_s(wanted(), seat(running=10)) == 0
    both = seat(Role.PREFILL, Role.DECODE, running=10)
    assert residents.by_prefill_s(wanted(), both) == pytest.approx(10 * both.prefill_s(1000))


def test_what_is_pending_counts_as_resident_and_takes_room() -> None:
    later = seat(Role.DECODE, running=2, free=100, pending=Pending(sequences=3, kv_blocks=40))
    assert later.residents == 5
    assert room.has_room(wanted(60 * 16 - 1), later)
    assert not room.has_room(wanted(60 * 16), later), "the first token needs a place, too"
    assert room.no_room_s(wanted(60 * 16), later) == Weights().room_s


def test_a_drifting_worker_is_taken_for_as_slow_as_it_is() -> None:
    slow = seat(queued=512, correction=Correction(ttft=2.0, itl=3.0))
    assert ttft.ttft_s(wanted(), slow) == pytest.approx(2 * ttft.ttft_s(wanted(), seat(queued=512)))
    assert slow.itl_with_s(1000) == pytest.approx(3 * seat(queued=512).itl_with_s(1000))


def test_a_missed_target_weighs_more_the_further_off_and_nothing_when_it_is_met() -> None:
    weights = Weights()
    own_s = ttft.ttft_s(wanted(), seat())
    met, missed = wanted(ttft_s=own_s + 0.01), wanted(ttft_s=own_s - 0.01)
    assert targets.pair_missed_s(met, seat(), seat(Role.DECODE), 0.0) == 0
    assert targets.pair_missed_s(missed, seat(), seat(Role.DECODE), 0.0) == pytest.approx(
        weights.missed_s + weights.excess * 0.01
    )
    waited = wanted(ttft_s=own_s + 0.01, waited_s=0.02)
    assert targets.pair_missed_s(waited, seat(), seat(Role.DECODE), 0.0) > weights.missed_s


def test_the_crossing_is_part_of_the_mean_itl() -> None:
    decode = seat(Role.DECODE)
    wants = wanted(osl=10, itl_s=decode.itl_with_s(1000) + 0.005)
    assert targets.itl_over_s(wants, decode, 0.04) < 0 < targets.itl_over_s(wants, decode, 0.06)


def test_every_resident_with_a_target_that_a_route_would_break_counts() -> None:
    weights = Weights()
    held = replace(seat(Role.DECODE, running=4), targets=Targets(strictest_s=0.016, count=3))
    missed_s = targets.pair_missed_s(wanted(500, osl=1000), seat(), held, 0.0)
    assert held.itl_with_s(500) < 0.016
    assert missed_s == 0
    over_s = held.itl_with_s(2000) - 0.016
    assert targets.pair_missed_s(wanted(2000, osl=1000), seat(), held, 0.0) == pytest.approx(
        3 * (weights.missed_s + weights.excess * 50 * over_s)
    )


def test_the_price_is_of_the_whole_worker_in_prefill_and_of_a_share_of_its_batch_in_decode() -> None:
    dollars_per_s = 36 / 3600
    prefill, decode = seat(dollars_per_s=dollars_per_s), seat(Role.DECODE, running=3, dollars_per_s=dollars_per_s)
    assert price.prefill_price_s(wanted(), prefill) == pytest.approx(10 * dollars_per_s * prefill.prefill_s(1000))
    assert price.decode_price_s(wanted(osl=1000), decode) == pytest.approx(
        10 * dollars_per_s * 100 * decode.itl_with_s(1000) / 4
    )


def test_weights_scale_their_scorers_and_no_others() -> None:
    prefill = seat(Role.PREFILL, Role.DECODE, running=2, dollars_per_s=0.01)
    decode = seat(Role.DECODE, running=2, free=1, dollars_per_s=0.01)
    crossing = Crossing(0.5, staged=False)
    plain = pair_scores(wanted(ttft_s=0.001), prefill, decode, crossing)
    for name, weights in {
        "itl": Weights(itl=2.0),
        "residents": Weights(residents=2.0),
        "transfer": Weights(transfer=2.0),
        "price": Weights(dollar_s=20.0),
        "room": Weights(room_s=2.0),
        "load": Weights(load_s=2e-5),
    }.items():
        wants = wanted(ttft_s=0.001, policy=Policy(weights=weights, slo_margin=1.0))
        scaled = pair_scores(wants, prefill, decode, crossing)
        assert {each for each in plain if scaled[each] != plain[each]} == {name}
        assert scaled[name] == pytest.approx(2 * plain[name])


def test_alone_nothing_crosses_and_the_queue_counts_once() -> None:
    both = seat(Role.PREFILL, Role.DECODE, queued=512, running=2)
    scores = alone_scores(wanted(), both)
    assert (scores["transfer"], scores["held_up"]) == (0, 0)
    assert scores["load"] == pytest.approx(both.load * Weights().load_s)
    assert pair_scores(wanted(), seat(), both, Crossing(0.1))["held_up"] == pytest.approx(both.wait_s(0.0))
