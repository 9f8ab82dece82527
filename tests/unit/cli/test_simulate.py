"""`isthmus sim`, from its arguments to what it prints and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isthmus_cli.exits import Exit
from isthmus_cli.main import app
from isthmus_cli.shapes import SHAPES
from isthmus_sim.plan import Plan, draw_plan, dumps


def isthmus_sim(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["sim", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_a_seed_is_told_with_its_plan_its_trace_and_its_end() -> None:
    (seed, planned) = next((seed, plan.faults[0]) for seed in range(50) if len((plan := draw_plan(seed)).faults) == 1)
    code, out, _ = isthmus_sim("--seed", str(seed))
    assert code == Exit.OK
    lines = out.splitlines()
    assert f"{planned.fault} at" in out
    assert any(line.split()[1:3] == ["FAULT", planned.fault] for line in lines)
    assert any("worker.p0.prefill.submit" in line or "worker.p1.prefill.submit" in line for line in lines)
    assert lines[-1].startswith(f"seed {seed}: nothing is wrong")


def test_a_schedule_is_run_from_its_file(tmp_path: Path) -> None:
    schedule = tmp_path / "plan.json"
    schedule.write_text(dumps(draw_plan(3)))
    code, out, _ = isthmus_sim("--schedule", str(schedule), "--quiet")
    assert (code, out.splitlines()[-1].split(":")[0]) == (Exit.OK, "seed 3")


def test_json_has_its_shape_and_stands_alone() -> None:
    code, out, _ = isthmus_sim("--seed", "3", "--json")
    found = json.loads(out)
    assert code == Exit.OK
    assert SHAPES["sim"].problems(found) == []
    assert (found["seeds"], found["failures"]) == (1, [])
    assert len(found["trace"]) > 100


def test_what_fails_is_told_with_its_schedule_and_another_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus_sim.simulation.verdict", lambda *_args, **_more: "it does not please")
    code, out, _ = isthmus_sim("--seed", "3", "--quiet", "--whole", "--json")
    (failure,) = json.loads(out)["failures"]
    assert code == Exit.FAILED
    assert failure["problems"][0] == "it does not please"
    assert Plan.from_json(failure["schedule"]) == draw_plan(3)


def test_seeds_are_summed_up() -> None:
    code, out, _ = isthmus_sim("--seeds", "2", "--first", "3", "--jobs", "1")
    assert code == Exit.OK
    assert out.startswith("seeds=2 first=3 failed=0 ")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"seed": "x"}', '{"seed": 1, "size": {"slots": 4}, "faults": 3}'])
def test_what_is_no_schedule_is_refused_by_name(tmp_path: Path, text: str) -> None:
    schedule = tmp_path / "plan.json"
    schedule.write_text(text)
    code, _, err = isthmus_sim("--schedule", str(schedule))
    assert code == Exit.INVALID
    assert "holds no schedule" in err


def test_a_missing_schedule_is_refused_by_name(tmp_path: Path) -> None:
    code, _, err = isthmus_sim("--schedule", str(tmp_path / "none.json"))
    assert code == Exit.INVALID
    assert "cannot read" in err


def test_a_seed_and_a_schedule_at_once_are_refused(tmp_path: Path) -> None:
    code, out, err = isthmus_sim("--seed", "3", "--schedule", str(tmp_path / "any.json"))
    assert (code, out) == (Exit.INVALID, "")
    assert "--seed and --schedule are both given" in err
