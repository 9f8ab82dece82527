from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from isthmus_cli.main import app
from isthmus_planner.cost import catalog
from isthmus_planner.cost.calibration import codec
from isthmus_planner.cost.calibration.packaged import names
from isthmus_planner.plan.inputs import load_calibration

DATA = Path(__file__).parents[3] / "data" / "inferencemax.csv"


@pytest.fixture
def some(tmp_path: Path) -> Path:
    """Two small groups, the measurements of MI300X and of H200."""
    lines = DATA.read_text().splitlines()
    path = tmp_path / "some.csv"
    path.write_text("\n".join([lines[0], *(line for line in lines if line.startswith(("mi300x,", "h200,")))]) + "\n")
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["calibrate", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_constants_are_fitted_written_and_judged_elsewhere(some: Path, tmp_path: Path) -> None:
    out, predictions = tmp_path / "constants.yaml", tmp_path / "predictions.csv"
    code, text, _ = run(some, "--out", out, "--predictions", predictions)
    assert code == 0
    assert "30 measurements in 2 groups" in text
    assert "| mi300x deepseek-r1 | 15 |" in text
    assert len(yaml.safe_load(out.read_text())["groups"]) == 2
    rows = list(csv.DictReader(predictions.read_text().splitlines()))
    assert len(rows) == 30
    measured, p50, p90 = (float(rows[0][f"e2el_{kind}_s"]) for kind in ("measured", "p50", "p90"))
    assert measured == pytest.approx(p50, rel=0.2)
    assert p90 > p50
    assert rows[0]["calibrated"] == "True"

    first = run(some, "--fit", "none", "--constants", out, "--strict")
    assert first[0] == 0
    assert first == run(some, "--fit", "none", "--constants", out, "--strict"), "the same answer each time"


def test_from_specification_alone_everything_is_an_extrapolation(some: Path, tmp_path: Path) -> None:
    predictions = tmp_path / "predictions.csv"
    code, text, _ = run(some, "--fit", "none", "--predictions", predictions)
    assert code == 0
    assert "30 of them lie beyond" in text
    rows = list(csv.DictReader(predictions.read_text().splitlines()))
    assert {row["calibrated"] for row in rows} == {"False"}
    assert "was never measured" in rows[0]["extrapolated"]
    code, _, error = run(some, "--fit", "none", "--strict")
    assert code == 2
    assert "is an extrapolation, and 29 others are" in error


def test_a_part_is_held_out(some: Path, tmp_path: Path) -> None:
    predictions = tmp_path / "predictions.csv"
    code, text, _ = run(some, "--fit", "half", "--predictions", predictions)
    assert code == 0
    assert "| mi300x deepseek-r1 | 21 |" in text, "three halvings, seven of fifteen judged in each"
    assert len(predictions.read_text().splitlines()) == 1 + 14
    code, text, _ = run(some, "--fit", "5")
    assert code == 0
    assert "| mi300x deepseek-r1 | 30 |" in text


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["absent.csv"], "cannot read absent.csv"),
        (["{some}", "--fit", "most"], "give all, half, none or a number of points"),
        (["{some}", "--fit", "half", "--out", "x.yaml"], "constants are written only when fitted to everything"),
        (["{some}", "--constants", "{some}"], "holds no constants"),
        (["{some}", "--length-ratio", "0"], "length ratio"),
        (["{foreign}"], "1 x the accelerator 'tpu' is not known"),
        (["{binary}"], "cannot read"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(
    some: Path, tmp_path: Path, arguments: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    foreign, binary = tmp_path / "foreign.csv", tmp_path / "binary.csv"
    foreign.write_text("accelerator,model,concurrency,isl,osl,tpot_s\ntpu,gpt-oss-120b,1,1,1,1\n")
    binary.write_bytes(b"\xff\xfe\x00")
    names = {"some": some, "foreign": foreign, "binary": binary}
    code, _, error = run(*(argument.format(**names) for argument in arguments))
    assert (code, why in error) == (2, True), error


def test_an_accelerator_and_a_model_of_ones_own_are_known_wherever_the_constants_go(
    some: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = Path(catalog.__file__).parent / "data"
    for kind, name in (("accelerators", "h200"), ("models", "deepseek-r1")):
        (tmp_path / f"{name}.yaml").write_text((packaged / kind / f"{name}.yaml").read_text().replace(name, "mine", 1))
    lines = [line for line in some.read_text().splitlines() if line.startswith(("accelerator", "h200,"))]
    some.write_text("\n".join(lines).replace("h200,deepseek-r1", "h200.yaml,deepseek-r1.yaml"))
    monkeypatch.chdir(tmp_path)
    assert run(some, "--out", "own.yaml")[0] == 0

    monkeypatch.chdir("/")
    own = load_calibration(tmp_path / "own.yaml")
    subject = own.fits[0].subject
    assert subject.accelerator == catalog.accelerator(str(tmp_path / "h200.yaml"))
    assert subject.model == catalog.model(str(tmp_path / "deepseek-r1.yaml"))
    assert codec.dump(own, names()) == codec.dump(load_calibration(tmp_path / "own.yaml"), names())


def test_profiles_of_the_package_are_not_repeated_in_the_constants(some: Path, tmp_path: Path) -> None:
    assert run(some, "--out", tmp_path / "own.yaml")[0] == 0
    assert not {"accelerators", "models"} & yaml.safe_load((tmp_path / "own.yaml").read_text()).keys()
