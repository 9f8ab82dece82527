"""The laws against figures that were worked out on public data before they were written."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from isthmus_planner.cost import catalog, kv, laws, memory
from isthmus_planner.cost.constants import Constants
from isthmus_planner.cost.laws import DecodeLaw, TransferLaw, decode_law, experts_touched, prefill_law
from isthmus_planner.cost.layout import Layout, Precision
from isthmus_planner.cost.profiles import AcceleratorProfile
from isthmus_shared.errors import ConfigInvalid

H100 = catalog.accelerator("h100")
OSS = catalog.model("gpt-oss-120b")
R1 = catalog.model("deepseek-r1")
H100_OSS = Constants(
    layer_s=91.6e-6,
    weight_efficiency=0.9,
    kv_efficiency=0.9,
    sequence_s=14.8e-6,
    skew=0.8,
    prefill_efficiency=0.274,
    prefill_token_s=4.8e-6,
    prefill_base_s=0.023,
)
TP8 = Layout(tp=8)


@pytest.mark.parametrize(("batch", "touched"), [(1, 4.0), (8, 28.7), (32, 81.7), (64, 111.2)])
def test_a_batch_touches_as_many_experts_as_independent_routing_gives(batch: int, touched: float) -> None:
    assert experts_touched(batch, 128, 4) == pytest.approx(touched, abs=0.05)


def test_routing_skew_makes_a_batch_touch_fewer_experts_but_never_fewer_than_one_token_does() -> None:
    assert experts_touched(1, 128, 4, skew=0.3) == pytest.approx(4)
    assert experts_touched(32, 128, 4, skew=0.3) < experts_touched(32, 128, 4, skew=0.8) < 81.7


@pytest.mark.parametrize(
    ("model", "stored", "full"),
    [
        ("gpt-oss-120b", 73_728, 36_864),
        ("gpt-oss-20b", 49_152, 24_576),
        ("deepseek-r1", 70_272, 70_272),
        ("llama-3.3-70b", 327_680, 327_680),
        ("qwen3-235b-a22b", 192_512, 192_512),
    ],
)
def test_kv_bytes_per_token(model: str, stored: int, full: int) -> None:
    profile = catalog.model(model)
    assert kv.stored_bytes_per_token(profile, TP8) == stored
    assert kv.full_bytes_per_token(profile, TP8) == full
    fp8 = Layout(tp=8, kv=Precision.FP8)
    assert kv.stored_bytes_per_token(profile, fp8) == stored / 2


def test_windowed_layers_read_and_send_no_more_than_their_window() -> None:
    assert kv.window_bytes_per_sequence(OSS, TP8) == pytest.approx(4.7e6, rel=0.01)
    long, longer = kv.prompt_bytes(OSS, TP8, 8192), kv.prompt_bytes(OSS, TP8, 8193)
    assert longer - long == 36_864
    assert kv.prompt_bytes(OSS, TP8, 100) == 100 * 73_728


def test_kv_is_divided_over_no_more_ranks_than_there_are_heads() -> None:
    assert kv.shard(OSS, Layout(tp=16)) == 8
    assert kv.copies(OSS, Layout(tp=16)) == 2
    assert (kv.shard(R1, TP8), kv.copies(R1, TP8)) == (1, 8), "a latent is replicated on every rank"


@pytest.mark.parametrize(
    ("context", "tp", "batch", "measured_s"),
    [  # gpt-oss-120b on H100, vLLM: InferenceMAX, lengths 0.9 of the nominal ones
        (1382, 2, 4, 0.0051423),
        (1382, 8, 32, 0.0055506),
        (7834, 4, 64, 0.010116),
        (4608, 8, 64, 0.007078),
    ],
)
def test_a_decode_step_takes_what_was_measured(context: int, tp: int, batch: int, measured_s: float) -> None:
    law = decode_law(H100, OSS, Layout(tp=tp), H100_OSS)
    assert law.step_s(batch, batch * context) == pytest.approx(measured_s, rel=0.1)


def test_a_step_is_its_parts() -> None:
    law = decode_law(H100, OSS, TP8, H100_OSS)
    rate = 3.35e12 * 0.9
    assert law.b_s_per_token == pytest.approx(36_864 / (8 * rate))
    touched = experts_touched(16, 128, 4, 0.8) / 128
    by_hand = 36 * 91.6e-6 + (3.105e9 + 60.93e9 * touched) / (8 * rate) + 16 * 14.8e-6 + 16 * 4.72e6 / (8 * rate)
    assert law.a_s(16) == pytest.approx(by_hand, rel=1e-3)
    assert law.step_s(16, 1000) - law.a_s(16) == pytest.approx(1000 * law.b_s_per_token)


def test_a_run_of_steps_is_the_sum_of_its_steps() -> None:
    law = decode_law(H100, OSS, TP8, H100_OSS)
    one_by_one = math.fsum(law.step_s(7, 5000 + 7 * step) for step in range(900))
    assert law.run_s(7, 5000, 900) == pytest.approx(one_by_one, rel=1e-13)


def test_data_parallel_groups_share_sequences_and_experts_but_each_reads_the_dense_weights() -> None:
    accelerator = catalog.accelerator("b200")
    exact = Constants(layer_s=0, sequence_s=0, weight_efficiency=1, kv_efficiency=1)
    tensor = decode_law(accelerator, R1, Layout(tp=8), exact)
    data = decode_law(accelerator, R1, Layout(tp=1, dp=8, ep=8), exact)
    assert data.fixed_s == pytest.approx(8 * tensor.fixed_s)
    assert data.experts_s == pytest.approx(tensor.experts_s)
    assert data.b_s_per_token == pytest.approx(tensor.b_s_per_token / 8), "a latent is no longer read eight times"


def test_laws_take_arrays() -> None:
    law, prefill = decode_law(H100, OSS, TP8, H100_OSS), prefill_law(H100, OSS, TP8, H100_OSS)
    batches, contexts = np.array([1.0, 8, 64]), np.array([100.0, 9000, 70000])
    steps = law.step_s(batches, contexts)
    assert list(steps) == [law.step_s(b, k) for b, k in zip(batches, contexts, strict=True)]
    times = prefill.time_s(np.array([0.0, 64, 7373]), np.array([10.0, 0, 500]))
    assert list(times) == [prefill.time_s(n, c) for n, c in ((0.0, 10.0), (64.0, 0.0), (7373.0, 500.0))]
    assert times[0] == 0


@pytest.mark.parametrize(("tp", "isl", "ttft_s"), [(2, 7373, 0.2197), (4, 7373, 0.1422), (8, 7373, 0.1085)])
def test_a_prefill_takes_what_was_measured(tp: int, isl: int, ttft_s: float) -> None:
    law = prefill_law(H100, OSS, Layout(tp=tp), H100_OSS)
    assert law.time_s(isl) == pytest.approx(ttft_s, rel=0.08)


def test_prefill_counts_every_multiplication() -> None:
    exact = Constants(prefill_efficiency=1, prefill_base_s=0, prefill_token_s=0)
    law = prefill_law(dataclasses.replace(H100, memory_bytes_per_s=1e18), OSS, Layout(tp=1), exact)
    attention = 4 * 64 * 64 * 18

    def flops(new: int, cached: int) -> float:
        contexts = [cached + i + 0.5 for i in range(new)]
        return new * 2 * 5.133e9 + attention * sum(c + min(c, 128) for c in contexts)

    for new, cached in ((4096, 0), (64, 0), (2000, 1000), (50, 100)):
        assert law.time_s(new, cached) * 989e12 == pytest.approx(flops(new, cached), rel=1e-3)


def test_a_short_prefill_is_bound_by_reading_the_weights_it_touches() -> None:
    exact = Constants(weight_efficiency=1, prefill_efficiency=1, prefill_base_s=0, prefill_token_s=0, skew=1)
    law = prefill_law(H100, OSS, Layout(tp=1), exact)
    touched = experts_touched(2, 128, 4)
    assert law.time_s(2) == pytest.approx((OSS.dense_params * 2 + 60.93e9 * touched / 128) / 3.35e12, rel=1e-4)


def test_cached_tokens_cost_no_products_but_are_attended_to() -> None:
    law = prefill_law(H100, OSS, TP8, H100_OSS)
    assert law.time_s(1000) < law.time_s(1000, 7000) < law.time_s(8000)


def test_collectives_cost_nothing_on_one_accelerator_and_need_its_fabric_on_more() -> None:
    mi308x = catalog.accelerator("mi308x")
    assert laws.collective_s_per_token(mi308x, R1, Layout(tp=1)) == 0
    with pytest.raises(ConfigInvalid, match=r"scale_up_bytes_per_s.*'mi308x'.*unknown"):
        prefill_law(mi308x, R1, TP8, Constants())
    per_token = laws.collective_s_per_token(H100, OSS, TP8)
    assert per_token == pytest.approx(2 * 36 * 2880 * 2 * 2 * (7 / 8) / 450e9)


@pytest.mark.parametrize(
    ("accelerator", "model", "constants", "gigabytes_per_s"),
    [
        ("h100", "gpt-oss-120b", H100_OSS, 5.1),
        ("mi300x", "deepseek-r1", Constants(prefill_efficiency=0.1, prefill_base_s=0.136, prefill_token_s=0), 1.1),
    ],
)
def test_the_kv_rate_that_hides_the_transfer(
    accelerator: str, model: str, constants: Constants, gigabytes_per_s: float
) -> None:
    profile = catalog.model(model)
    law = prefill_law(catalog.accelerator(accelerator), profile, TP8, constants)
    rate = laws.hiding_kv_bytes_per_s(profile, TP8, law, 7373)
    assert rate / 1e9 == pytest.approx(gigabytes_per_s, rel=0.12)


def test_a_transfer_is_bound_by_descriptors_or_bytes_and_queues_behind_others() -> None:
    law = TransferLaw(setup_s=1e-3, descriptor_s=2.4e-6, bytes_per_s=25e9)
    assert law.time_s(25e6, 10) == pytest.approx(2e-3)
    assert law.time_s(25e6, 10_000) == pytest.approx(25e-3)
    assert law.queued_s(25e6, 10, 0) == pytest.approx(2e-3)
    assert law.queued_s(25e6, 10, 250) == pytest.approx(2e-3 * 1.5), "half loaded: half a service time of waiting"
    assert law.queued_s(25e6, 10, 500) == math.inf


def test_a_wire_is_as_fast_as_its_slower_end() -> None:
    slow = dataclasses.replace(H100, nic_bits_per_s=200e9)
    law = laws.transfer_law(H100, slow, nics=8)
    assert law.bytes_per_s == pytest.approx(200e9)
    assert laws.transfer_law(H100, slow, nics=8, pace_bytes_per_s=1e9).bytes_per_s == 1e9
    with pytest.raises(ConfigInvalid, match="nic_bits_per_s"):
        laws.transfer_law(H100, catalog.accelerator("n300"), nics=1)


def test_memory_holds_what_is_left_beside_the_weights() -> None:
    fit = memory.fit(H100, OSS, TP8)
    free = 80e9 * 0.9 - 2e9 - (60.93e9 + 4.263e9) / 8
    assert fit.kv_tokens == pytest.approx(8 * free / 73_728, rel=1e-3)
    assert fit.max_batch(8192) == int(fit.kv_tokens / 8192)
    replicated = memory.fit(catalog.accelerator("mi300x"), R1, TP8)
    free = 192e9 * 0.9 - 2e9 - 671.03e9 / 8
    assert replicated.kv_tokens == pytest.approx(free / 70_272, rel=1e-3), "each rank holds the whole latent"
    assert memory.fit(catalog.accelerator("mi300x"), R1, Layout(dp=8)).kv_tokens > 5 * replicated.kv_tokens


def test_a_model_that_does_not_fit_is_refused_with_both_sizes() -> None:
    with pytest.raises(ConfigInvalid, match=r"does not fit on 1 x h100.*671.0 GB.*72.0 GB.*raise tp"):
        memory.fit(H100, R1, Layout(tp=1))


@pytest.mark.parametrize("wrong", [{"weight_efficiency": 0.0}, {"layer_s": -1.0}, {"skew": math.nan}])
def test_impossible_constants_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigInvalid, match=next(iter(wrong))):
        Constants(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"tp": 0}, "tp"), ({"dp": -1}, "dp"), ({"tp": 2, "ep": 4}, "ep"), ({"kv": "fp4"}, "KV in fp4")],
)
def test_impossible_layouts_are_refused(wrong: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigInvalid, match=named):
        Layout(**wrong)  # type: ignore[arg-type]


def test_a_negative_bandwidth_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="memory_bytes_per_s = -1"):
        AcceleratorProfile("x", "x", "x", (Precision.BF16,), memory_bytes_per_s=-1)


def test_a_law_can_be_made_by_hand() -> None:
    law = DecodeLaw(0.01, 0, 0, 0, 0, 0.001, 1e-6)
    assert law.step_s(2, 1000) == pytest.approx(0.013)
