from __future__ import annotations

import math

import pytest

from isthmus_planner.cost.speeds import CostConstants
from isthmus_planner.routing.kv_size import KvSize, kv_size
from isthmus_planner.routing.rails import LEAST_FREE, Rails
from isthmus_shared.ids import Incarnation, NodeId
from isthmus_shared.kv.manifest import GroupKind, KvDtype, KvGroup, KvManifest
from isthmus_shared.kv.negotiate import kv_form
from isthmus_shared.messages.health import LaneRate, RelayRates
from isthmus_testing.clusters import relay, relay_ref

SIZE = KvSize(1000.0)
ASSUMED = CostConstants().crossing_tokens_per_s * 1000
A, B = NodeId("a"), NodeId("b")


def manifest(dtype: KvDtype, *groups: KvGroup) -> KvManifest:
    return KvManifest(model_fingerprint="f", prompt_tokens=1, version=2, dtype=dtype, groups=groups)


def group(kind: GroupKind, layers: int, heads: int, dim: int, *, first: int = 0, **more: int) -> KvGroup:
    return KvGroup(
        kind=kind,
        layer_ids=tuple(range(first, first + layers)),
        kv_heads=heads,
        head_dim=dim,
        token_start=0,
        token_end=1,
        **more,
    )


@pytest.mark.parametrize(
    ("described", "size"),
    [
        (manifest(KvDtype.BF16, group(GroupKind.FULL, 3, 8, 64)), KvSize(3 * 2 * 8 * 64 * 2)),
        (manifest(KvDtype.FP8_E4M3FNUZ, group(GroupKind.FULL, 3, 8, 64)), KvSize(3 * 2 * 8 * 64)),
        (manifest(KvDtype.BF16, group(GroupKind.LATENT, 5, 1, 576)), KvSize(5 * 576 * 2)),
        (
            manifest(
                KvDtype.FP16,
                group(GroupKind.FULL, 2, 4, 32),
                group(GroupKind.SLIDING, 2, 4, 32, first=2, window_tokens=128),
            ),
            KvSize(2 * 2 * 4 * 32 * 2, 2 * 2 * 4 * 32 * 2 * 128),
        ),
        (manifest(KvDtype.BF16, group(GroupKind.FULL, 3, 2, 64, heads_total=8)), KvSize(3 * 2 * 2 * 64 * 2)),
    ],
)
def test_a_prompts_bytes_are_read_from_the_form_that_workers_tell(described: KvManifest, size: KvSize) -> None:
    assert kv_size(kv_form(described)) == size
    assert size.of(10) == 10 * size.bytes_per_token + size.window_bytes


@pytest.mark.parametrize(
    "form", ["", "fp32", "bf16/f/", "bf16/f/full[0]h8", "bf17/f/full[0]h8d64", "bf16/f/odd[0]h8d64"]
)
def test_a_form_of_another_release_has_no_known_size(form: str) -> None:
    assert kv_size(form) is None


def test_a_node_is_taken_for_what_is_assumed_until_it_was_seen_to_do_more() -> None:
    rails = Rails(CostConstants())
    assert rails.rail(A, SIZE).out_s_per_byte == pytest.approx(1 / ASSUMED)
    rails.beat(relay("a"), 0.0)
    rails.beat(relay("a", sent=int(4 * ASSUMED)), 1.0)
    rails.beat(relay("a", sent=int(4 * ASSUMED)), 2.0)
    idle = rails.rail(A, SIZE)
    assert idle.out_s_per_byte == pytest.approx(1 / (4 * ASSUMED)), "its best second counts"
    assert idle.in_s_per_byte == pytest.approx(1 / ASSUMED)


def test_what_moves_now_is_taken_off_and_some_is_always_left() -> None:
    rails = Rails(CostConstants())
    rails.beat(relay("a"), 0.0)
    rails.beat(relay("a", received=int(0.75 * ASSUMED)), 1.0)
    assert rails.rail(A, SIZE).in_s_per_byte == pytest.approx(1 / (0.25 * ASSUMED))
    rails.beat(relay("a", received=int(1.75 * ASSUMED)), 2.0)
    assert rails.rail(A, SIZE).in_s_per_byte == pytest.approx(1 / (LEAST_FREE * ASSUMED))


def test_two_beats_at_once_tell_of_no_rate_and_a_new_life_begins_anew() -> None:
    rails = Rails(CostConstants())
    rails.beat(relay("a"), 0.0)
    rails.beat(relay("a", sent=10**12), 0.001)
    assert rails.rail(A, SIZE).out_s_per_byte == pytest.approx(1 / ASSUMED)
    again = relay("a").model_copy(update={"incarnation": Incarnation("second")})
    rails.beat(again, 5.0)
    assert rails.rail(A, SIZE).out_s_per_byte == pytest.approx(1 / ASSUMED)


def test_without_a_readable_form_crossings_are_told_in_tokens() -> None:
    rails = Rails(CostConstants())
    rails.beat(relay("a"), 0.0)
    rails.beat(relay("a", sent=10**12, pool_free=5), 1.0)
    rail = rails.rail(A, None)
    assert rail.out_s_per_byte == pytest.approx(1 / CostConstants().crossing_tokens_per_s)
    assert rail.staging_free_bytes == math.inf
    assert rails.rail(A, SIZE).staging_free_bytes == 5


def test_ceilings_hold_lane_by_lane_until_they_are_too_old() -> None:
    rails = Rails(CostConstants())
    rails.beat(relay("a"), 0.0)
    rails.beat(relay("b"), 0.0)
    assert not rails.bounded(0.0)
    lane = LaneRate(sender=relay_ref("a").incarnation, receiver=relay_ref("b").incarnation, bytes_per_s=5.0)
    rails.rates(RelayRates(lanes=(lane,), default_bytes_per_s=9.0, valid_s=2.0), 10.0)
    assert rails.bounded(11.9)
    assert rails.ceiling_bytes_per_s(A, B, 11.9) == 5
    assert rails.ceiling_bytes_per_s(B, A, 11.9) == 9
    assert rails.ceiling_bytes_per_s(A, NodeId("unknown"), 11.9) == 9
    assert rails.ceiling_bytes_per_s(A, B, 12.0) == math.inf
    assert not rails.bounded(12.0)
    rails.rates(RelayRates(valid_s=2.0), 12.0)
    assert not rails.bounded(12.5)


def test_relays_are_known_by_their_lives() -> None:
    rails = Rails(CostConstants())
    rails.beat(relay("a"), 0.0)
    assert rails.lives(relay_ref("a"))
    assert not rails.lives(relay_ref("a").model_copy(update={"incarnation": "other"}))
    rails.keep({B})
    assert not rails.lives(relay_ref("a"))
