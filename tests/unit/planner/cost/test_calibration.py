from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from isthmus_planner.cost import catalog
from isthmus_planner.cost.calibration import codec, evaluation, packaged
from isthmus_planner.cost.calibration.calibrate import Calibrated, calibrate, elsewhere, groups_of, without
from isthmus_planner.cost.calibration.fitting import fit
from isthmus_planner.cost.calibration.groups import Group, GroupKey, grouped, make_group, subject_of
from isthmus_planner.cost.calibration.hierarchy import prior_for
from isthmus_planner.cost.calibration.measurements import Measurement, parse
from isthmus_planner.cost.calibration.parameters import constants_of, theta_of
from isthmus_planner.cost.calibration.store import Calibration, Question
from isthmus_planner.cost.constants import Constants
from isthmus_planner.cost.layout import Layout, Precision
from isthmus_planner.cost.prediction import Prediction
from isthmus_shared.errors import ConfigInvalid

DATA = Path(__file__).parents[4] / "data" / "inferencemax.csv"
TRUTH = Constants(
    layer_s=60e-6,
    weight_efficiency=0.6,
    kv_efficiency=0.8,
    sequence_s=25e-6,
    skew=0.5,
    prefill_efficiency=0.3,
    prefill_base_s=0.02,
    prefill_token_s=2e-6,
    interference=0.8,
    admission_steps=2.0,
    run_share=0.97,
)
NOTHING_KNOWN = Calibration("nothing", ())


def made_up(
    constants: Constants, *, accelerator: str = "mi325x", noise: float = 0.0, seed: int = 0
) -> list[Measurement]:
    """What a benchmark would report if the model were true, in every configuration."""
    rows = [
        Measurement(
            line=line,
            accelerator=catalog.accelerator("mi325x"),
            model=catalog.model("gpt-oss-120b"),
            framework="vllm",
            layout=Layout(tp=tp, weights=Precision.FP4),
            concurrency=clients,
            isl_tokens=isl,
            osl_tokens=osl,
            itl_s=0.005,
            tpot_s=0.005,
            ttft_s=1.0,
            e2el_s=1.0,
            output_tok_per_s=1.0,
        )
        for line, (tp, isl, osl, clients) in enumerate(
            (tp, isl, osl, clients)
            for tp in (1, 4)
            for isl, osl in ((900.0, 900.0), (900.0, 7000.0), (7000.0, 900.0))
            for clients in (4.0, 8.0, 16.0, 32.0, 64.0)
        )
    ]
    (group,) = grouped(rows).values()
    found = group.predict(constants)
    scatter = np.exp(noise * np.random.default_rng(0).standard_normal((len(rows), 5)))
    return [
        dataclasses.replace(
            row,
            itl_s=found["itl"][i] * scatter[i, 0],
            tpot_s=found["tpot"][i] * scatter[i, 1],
            ttft_s=found["ttft"][i] * scatter[i, 2],
            e2el_s=found["e2el"][i] * scatter[i, 3],
            output_tok_per_s=found["throughput"][i] * scatter[i, 4],
        )
        for i, row in enumerate(rows)
    ]


def group_of(rows: list[Measurement]) -> Group:
    return make_group(grouped(rows)[next(iter(grouped(rows)))].subject, rows)


@pytest.fixture(scope="module")
def public() -> dict[GroupKey, Group]:
    return groups_of(parse(DATA.read_text(), packaged.names())[0])


@pytest.fixture(scope="module")
def few() -> Calibrated:
    return calibrate(grouped(made_up(TRUTH, noise=0.02)), NOTHING_KNOWN, "made up")


def test_the_truth_is_found_where_the_model_is_true() -> None:
    group = group_of(made_up(TRUTH))
    seen = np.arange(len(group)) % 2 == 0
    found = constants_of(fit(group.part(seen), prior_for(group.subject, {}, {})))
    errors = evaluation.errors_of({group.subject.key: group.part(~seen)}, {group.subject.key: found})
    assert all(error < 0.01 for name, error in errors[group.subject.key].means().items() if name != "ttft")
    assert found.layer_s == pytest.approx(TRUTH.layer_s, rel=0.25)
    assert found.interference == pytest.approx(TRUTH.interference, rel=0.15)


def test_wild_measurements_do_not_move_the_fit() -> None:
    rows = made_up(TRUTH)
    clean = constants_of(fit(group_of(rows), prior_for(group_of(rows).subject, {}, {})))
    for index in (3, 17):
        rows[index] = dataclasses.replace(
            rows[index], itl_s=rows[index].itl_s * 3, tpot_s=rows[index].tpot_s * 3, e2el_s=rows[index].e2el_s * 3
        )
    group = group_of(rows)
    bent = constants_of(fit(group, prior_for(group.subject, {}, {})))
    assert group.predict(bent)["tpot"] == pytest.approx(group.predict(clean)["tpot"], rel=0.03)


def test_without_a_measurement_the_fit_is_the_prior() -> None:
    group = group_of(made_up(TRUTH))
    prior = prior_for(group.subject, {}, {})
    assert fit(group.part(np.zeros(len(group), dtype=np.bool_)), prior) == pytest.approx(prior.middle, abs=1e-4)


def test_an_unmeasured_accelerator_gets_the_habits_of_its_engine_and_model() -> None:
    known = packaged.constants()
    fits, facts = elsewhere(known).fits, elsewhere(known).facts
    model, layout = catalog.model("gpt-oss-120b"), Layout(tp=8)

    def layer_s(accelerator: str, framework: str) -> float:
        subject = subject_of(catalog.accelerator(accelerator), model, layout, framework)
        return constants_of(prior_for(subject, fits, facts).middle).layer_s

    assert layer_s("b300", "trt") < layer_s("b300", "vllm")
    assert layer_s("b300", "vllm") < layer_s("mi355x", "vllm")
    assert layer_s("mi355x", "vllm") < layer_s("mi300x", "vllm")


def test_held_out_configurations_of_the_public_data_are_predicted(public: dict[GroupKey, Group]) -> None:
    """The targets: decode ITL 4 %, E2EL 6 %, throughput 6 % for every pair of accelerator and model, over two halvings;
    a single one may leave out every long prompt of a pair."""
    halves = [evaluation.hold_out(public, {}, {}, points=None, seed=seed) for seed in (0, 1)]
    for held in halves:
        assert all(abs(len(held.judged[key]) - len(group) / 2) <= 0.5 for key, group in public.items())
    pairs = evaluation.pooled(halves[0].errors())
    for pair, errors in evaluation.pooled(halves[1].errors()).items():
        pairs[pair].merge(errors)
    assert len(pairs) == 6
    for pair, errors in pairs.items():
        assert errors.mean("decode") <= 0.041, pair
        assert errors.mean("e2el") <= 0.06, pair
        assert errors.mean("throughput") <= 0.06, pair
    assert evaluation.together(pairs.values()).mean("throughput_stall") <= 0.045


def test_runs_that_stood_still_are_named_and_explained_by_their_own_p99(public: dict[GroupKey, Group]) -> None:
    stalled = [(str(key), int(np.sum(group.stall_s > 0))) for key, group in public.items() if np.any(group.stall_s > 0)]
    assert [count for _, count in stalled] == [8, 6]
    assert all(name.startswith("b200 deepseek-r1") for name, _ in stalled)


@pytest.mark.slow
def test_an_accelerator_that_was_never_measured_is_predicted_within_a_quarter(public: dict[GroupKey, Group]) -> None:
    alone = evaluation.together(evaluation.leave_one_accelerator_out(public).values())
    assert alone.mean("decode") <= 0.25
    assert alone.mean("e2el") <= 0.25


def test_three_points_of_a_new_accelerator_are_enough_for_a_tenth(public: dict[GroupKey, Group]) -> None:
    own = {key: group for key, group in public.items() if key.accelerator == "h100"}
    known = elsewhere(without(packaged.constants(), own))
    held = evaluation.hold_out(own, known.fits, known.facts, points=3, seed=1)
    (errors,) = held.errors().values()
    assert len(held.judged[next(iter(own))]) == 40
    assert errors.mean("decode") <= 0.1
    assert errors.mean("e2el") <= 0.1


def test_calibration_reports_errors_out_of_sample_and_spreads_by_them(few: Calibrated) -> None:
    (found,) = few.calibration.fits
    inside, outside = found.errors["in_sample"], found.errors["left_out"]
    assert inside["e2el"] < outside["e2el"] < 0.03
    assert 1.01 < found.constants.spread_of("e2el") < 1.06
    assert found.points == 30
    assert found.constants.calibrated
    assert "30 measurements of mi325x gpt-oss-120b vllm fp4 (made up)" in found.constants.source


def test_a_spread_is_on_the_bad_side() -> None:
    constants = Constants(spread={"e2el": 1.1, "throughput": 1.2}, calibrated=True, source="x")
    assert Prediction.latency(2.0, constants, "e2el") == Prediction(2.0, pytest.approx(2.2), True, "x")
    assert constants.spread_of("itl") == 2.0
    assert dataclasses.replace(constants, spread={"tpot": 1.05}).spread_of("itl") == 1.05
    assert Prediction.throughput(600.0, constants) == Prediction(600.0, pytest.approx(500.0), True, "x")


def test_nine_in_ten_measurements_keep_to_a_spread_and_parts_count_alike() -> None:
    slower, faster = evaluation.Errors(), evaluation.Errors()
    for index in range(10):
        slower.values["e2el"].append(0.1 * index)
        slower.values["throughput"].append(-0.1 * index)
        faster.values["e2el"].extend([-1.0] * 10)
        faster.values["throughput"].extend([1.0] * 10)
    assert slower.spread() == {"e2el": pytest.approx(np.exp(0.8)), "throughput": pytest.approx(np.exp(0.8))}
    assert faster.spread() == {"e2el": 1.0, "throughput": 1.0}
    both = evaluation.spread_of([slower, faster])
    assert both["e2el"] == pytest.approx(np.exp(0.7)), "a fifth of the ten, though they are a tenth of all"


def test_constants_survive_a_file_and_are_the_same_text_each_time(few: Calibrated) -> None:
    text = codec.dump(few.calibration, packaged.names())
    again = codec.load(text, packaged.names(), "file")
    assert codec.dump(again, packaged.names()) == text
    assert theta_of(again.fits[0].constants) == pytest.approx(theta_of(few.calibration.fits[0].constants), abs=1e-3)


def test_the_packaged_constants_belong_to_the_data_in_this_repository() -> None:
    known = packaged.constants()
    assert "inferencemax.csv" in known.source
    assert sum(each.points for each in known.fits) == 315
    assert known.specification_spread["e2el"] > 1.1


def question(**change: object) -> Question:
    base = Question(
        catalog.accelerator("mi325x"), catalog.model("gpt-oss-120b"), Layout(tp=4), "vllm", 16.0, 900.0, 900.0
    )
    return dataclasses.replace(base, **change)  # type: ignore[arg-type]


def test_constants_are_calibrated_inside_the_measured_ranges_only(few: Calibrated) -> None:
    inside = few.calibration.constants_for(question(), strict=True)
    assert inside.calibrated
    for change, named in (
        ({"layout": Layout(tp=8)}, "8 accelerators (measured: 1, 4)"),
        ({"concurrency": 256.0}, "concurrency 256 (measured: 4 to 64)"),
        ({"isl_tokens": 32_000.0}, "isl_tokens 32000"),
        ({"osl_tokens": 10.0}, "osl_tokens 10"),
    ):
        beyond = few.calibration.constants_for(question(**change))
        assert not beyond.calibrated
        assert named in beyond.source
        assert beyond.spread_of("e2el") == pytest.approx(inside.spread_of("e2el") ** 2)
        with pytest.raises(ConfigInvalid, match="extrapolation was refused"):
            few.calibration.constants_for(question(**change), strict=True)


def test_what_was_never_measured_is_predicted_from_specification_and_says_so(few: Calibrated) -> None:
    other = question(accelerator=catalog.accelerator("h200"))
    constants = few.calibration.constants_for(other)
    assert not constants.calibrated
    assert constants.source.startswith("from specification, with the habits of 1 measured groups")
    assert constants.spread_of("e2el") == 2.0, "with a single accelerator measured nobody knows better"
    with pytest.raises(ConfigInvalid, match="h200 gpt-oss-120b vllm fp4 was never measured"):
        few.calibration.constants_for(other, strict=True)


def test_an_unnamed_engine_is_the_one_measured_most() -> None:
    known = packaged.constants()
    asked = Question(catalog.accelerator("b200"), catalog.model("gpt-oss-120b"), Layout(tp=2))
    found = known.find(asked)
    assert found is not None
    assert found.key.framework == "vllm"
    assert known.constants_for(asked).calibrated


def test_measurements_are_never_their_own_prior(public: dict[GroupKey, Group]) -> None:
    some = {key: group for key, group in public.items() if key.accelerator == "b200" and key.model == "gpt-oss-120b"}
    left = {each.key for each in without(packaged.constants(), some).fits}
    assert not left & set(some)
    assert {key.accelerator for key in left} == {"b200", "h100", "h200", "mi300x", "mi355x"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not YAML"),
        ("a: 1", "holds no constants: format"),
        ("format: 1\nsource: x\ngroups: [{accelerator: h100}]", "groups.0.model"),
    ],
)
def test_a_file_without_constants_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigInvalid, match=why):
        codec.load(text, packaged.names(), "file")


def test_constants_of_another_version_are_refused_by_name(few: Calibrated) -> None:
    text = codec.dump(few.calibration, packaged.names()).replace("    skew:", "    skewness:")
    with pytest.raises(ConfigInvalid, match="lack or add skew, skewness"):
        codec.load(text, packaged.names(), "file")
