from __future__ import annotations

import math

import numpy as np
import pytest

from isthmus_planner.cost.calibration import packaged
from isthmus_planner.cost.calibration.groups import grouped
from isthmus_planner.cost.calibration.measurements import LeftOut, Measurement, parse
from isthmus_planner.cost.layout import Precision
from isthmus_shared.errors import ConfigInvalid

HEADER = (
    "accelerator,model,framework,precision,tp,ep,dp_attention,concurrency,isl,osl,tpot_s_p50,output_tok_per_s_per_gpu"
)
ROW = "h100,gpt-oss-120b,vllm,fp4,2,1,false,8,1024,1024,0.006,600"


def read(*lines: str, length_ratio: float = 0.9) -> tuple[tuple[Measurement, ...], tuple[LeftOut, ...]]:
    return parse("\n".join(lines) + "\n", packaged.names(), length_ratio=length_ratio)


def one(*lines: str) -> Measurement:
    used, left_out = read(*lines)
    assert not left_out
    assert len(used) == 1
    return used[0]


def test_lengths_are_the_real_ones_and_throughput_is_the_replicas() -> None:
    row = one(HEADER, ROW)
    assert (row.isl_tokens, row.osl_tokens) == (pytest.approx(921.6), pytest.approx(921.6))
    assert row.output_tok_per_s == 1200
    assert math.isnan(row.e2el_s)
    measured = one(HEADER + ",isl_mean,osl_mean", ROW + ",1000,500")
    assert (measured.isl_tokens, measured.osl_tokens) == (1000, 500)


def test_few_columns_are_enough_and_milliseconds_are_understood() -> None:
    row = one("accelerator, model, concurrency, isl, osl, tpot_ms", "mi300x, gpt-oss-120b, 4, 1024, 1024, 26.6")
    assert row.tpot_s == pytest.approx(0.0266)
    assert (row.framework, row.layout.accelerators, row.layout.weights) == ("", 1, None)
    assert math.isnan(row.output_tok_per_s)


def test_total_throughput_serves_where_output_throughput_is_missing() -> None:
    header = HEADER.replace("output_tok", "total_tok")
    row = one(header, ROW.replace("1024,1024", "8192,1024"))
    assert row.output_tok_per_s == pytest.approx(1200 / 9)


def test_an_engine_may_stand_behind_the_accelerators_name() -> None:
    row = one(HEADER, ROW.replace("h100", "b200-trt").replace("vllm", ""))
    assert (row.accelerator.name, row.framework) == ("b200", "trt")


def test_dp_attention_is_a_layout_of_groups_of_one() -> None:
    row = one(HEADER, ROW.replace("2,1,false", "4,4,true"))
    assert (row.layout.tp, row.layout.dp, row.layout.ep) == (1, 4, 4)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"disagg": "True"}, "disaggregated"),
        ({"is_multinode": "true"}, "spans nodes"),
        ({"accelerator": "gb900"}, "'gb900' is not known"),
        ({"model": "gpt-9"}, "'gpt-9' is not known"),
        ({"tpot_s_p50": ""}, "no latency"),
        ({"accelerator": "mi308x"}, "needs scale_up_bytes_per_s of accelerator 'mi308x'"),
        ({"ep": "16"}, "ep = 16 over 2 accelerators"),
        ({"osl": ""}, "no concurrency, isl or osl"),
        ({"precision": "bf16"}, "does not fit on 2 x h100"),
        ({"tpot_s_p50": "6", "e2el_s_p50": "6"}, "no room for (units?)"),
        ({"ttft_s_p50": "80", "e2el_s_p50": "6"}, "first token long after its end"),
        ({"e2el_s_p50": "6000"}, "more throughput than its clients and latency allow"),
        ({"e2el_s_p50": "6", "output_tok_per_s_per_gpu": "60000"}, "more throughput than its clients"),
    ],
)
def test_rows_that_say_nothing_of_this_model_are_left_out_with_the_reason(change: dict[str, str], why: str) -> None:
    cells = dict(zip(HEADER.split(","), ROW.split(","), strict=True)) | {"disagg": "", "is_multinode": ""} | change
    used, left_out = read(",".join(cells), ",".join(cells.values()))
    assert not used
    assert (left_out[0].line, len(left_out)) == (2, 1)
    assert why in left_out[0].why


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tpot_s_p50", "fast"),
        ("tpot_s_p50", "-1"),
        ("isl", "0"),
        ("tp", "1.5"),
        ("tp", "inf"),
        ("dp_attention", "maybe"),
        ("precision", "int3"),
        ("concurrency", "1e400"),
        ("isl", "1e300"),
        ("tpot_s_p50", "1e-320"),
    ],
)
def test_a_wrong_cell_is_refused_by_line_and_column(column: str, value: str) -> None:
    cells = dict(zip(HEADER.split(","), ROW.split(","), strict=True)) | {column: value}
    with pytest.raises(ConfigInvalid, match=rf"line 3: {column} is '{value}'"):
        read(HEADER, ROW, ",".join(cells.values()))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no column accelerator"),
        ("accelerator,model,concurrency,isl\n", "no column osl"),
        ("accelerator,model,concurrency,isl,osl\n", "no latency"),
        ("accelerator,model,concurrency,isl,osl,tpot_ms,tpot_ms\n", "two columns are named tpot_ms"),
    ],
)
def test_a_file_that_is_no_such_table_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigInvalid, match=why):
        parse(text, packaged.names())


def test_messages_of_several_tokens_are_found_and_their_gaps_not_taken_for_latency() -> None:
    header = HEADER + ",itl_s_p50"
    used, _ = read(header, ROW + ",0.0598", ROW + ",0.055", ROW + ",0.041")
    (group,) = grouped(used).values()
    assert group.tokens_per_message == 10
    assert np.all(np.isnan(group.observed["itl"]))
    used, _ = read(header, ROW + ",0.0058", ROW + ",0.004")
    (group,) = grouped(used).values()
    assert group.tokens_per_message == 1
    assert list(group.observed["itl"]) == [0.0058, 0.004]


def test_a_run_that_stood_still_is_told_by_littles_law_and_lends_no_throughput() -> None:
    header = HEADER + ",e2el_s_p50,ttft_s_p99"
    steady_s = 8 * 921.6 / 1200
    used, _ = read(header, f"{ROW},{steady_s},0.2", f"{ROW},{steady_s * 0.7},30")
    (group,) = grouped(used).values()
    assert [row.steady_share for row in group.rows] == [pytest.approx(1), pytest.approx(0.7)]
    assert np.isnan(group.observed["throughput"]).tolist() == [False, True]
    assert group.stall_s.tolist() == [0, 30]


def test_engines_precisions_and_layouts_have_groups_of_their_own() -> None:
    rows = [ROW, ROW.replace("vllm", "trt"), ROW.replace("fp4", "fp8"), ROW.replace("2,1,false", "2,2,true")]
    used, _ = read(HEADER, *rows, ROW.replace("fp4,2", "fp4,8"))
    groups = grouped(used)
    assert sorted(len(group) for group in groups.values()) == [1, 1, 1, 2]
    assert "h100 gpt-oss-120b vllm fp4 dp-attention expert-parallel" in [str(key) for key in groups]


def test_other_names_of_engines_and_precisions_are_understood() -> None:
    row = one(HEADER, ROW.replace("vllm", "TRTLLM").replace("fp4", "MXFP4").replace("gpt-oss-120b", "gptoss"))
    assert (row.framework, row.layout.weights, row.model.name) == ("trt", Precision.FP4, "gpt-oss-120b")


def test_a_line_that_is_no_csv_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match=r"line 2 is no CSV: field larger than field limit"):
        read(HEADER, ROW, "x" * 200_000)
    with pytest.raises(ConfigInvalid, match=r"the first line is no CSV"):
        read("x" * 200_000, ROW)
