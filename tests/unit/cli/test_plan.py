from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from isthmus_cli import spec
from isthmus_cli.main import app

EXAMPLES = Path(__file__).parents[3] / "examples" / "plan"
CLUSTER: dict[str, Any] = {"nodes": [{"accelerator": "h100", "count": 1}, {"accelerator": "mi300x", "count": 1}]}
WORKLOAD: dict[str, Any] = {
    "model": "gpt-oss-120b",
    "requests": [{"isl_tokens": 2048, "osl_tokens": 128}],
    "itl_ms": 15,
    "objective": "throughput",
}


def run(tmp_path: Path, cluster: Any = CLUSTER, workload: Any = WORKLOAD, *more: str) -> Result:
    paths = []
    for name, content in (("cluster.yaml", cluster), ("workload.yaml", workload)):
        paths.append(tmp_path / name)
        paths[-1].write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return CliRunner().invoke(app, ["plan", *map(str, paths), *more])


def cluster(**changes: Any) -> dict[str, Any]:
    first, second = CLUSTER["nodes"]
    return {"nodes": [{**first, **changes}, second]}


def workload(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**WORKLOAD, **changes}.items() if value is not None}


BAD = {
    "an unknown accelerator": (cluster(accelerator="h10"), WORKLOAD, "h10", "did you mean h100"),
    "a missing field": ({"nodes": [{"accelerator": "h100"}]}, WORKLOAD, "nodes.0.count", "Field required"),
    "a field that is none": (cluster(cuont=3), WORKLOAD, "nodes.0.cuont", "not permitted"),
    "a top field that is none": ({**CLUSTER, "relays": {}}, WORKLOAD, "relays", "did you mean relay"),
    "a negative count": (cluster(count=-1), WORKLOAD, "nodes.0.count", "-1"),
    "a negative bandwidth": (cluster(nic_gbit_per_s=-400), WORKLOAD, "nodes.0.nic_gbit_per_s", "-400"),
    "a bandwidth that is no number": (cluster(nic_gbit_per_s=float("nan")), WORKLOAD, "nic_gbit_per_s", "finite"),
    "no nodes": ({"nodes": []}, WORKLOAD, "nodes", "at least 1"),
    "two types of one name": ({"nodes": [CLUSTER["nodes"][0]] * 2}, WORKLOAD, "h100", "its own `name`"),
    "tp that divides nothing": (cluster(tp=[3]), WORKLOAD, "tp = 3", "8 accelerators"),
    "a constant that is none": (cluster(constants={"layer_ms": 1}), WORKLOAD, "layer_ms", "did you mean layer_s"),
    "an unknown model": (CLUSTER, workload(model="gpt-9"), "gpt-9", "known are"),
    "no requests": (CLUSTER, workload(requests=None), "requests", "trace"),
    "a prompt of no tokens": (CLUSTER, workload(requests=[{"isl_tokens": 0, "osl_tokens": 1}]), "isl_tokens", "1"),
    "a length with no middle": (CLUSTER, workload(requests=[{"isl_tokens": {}, "osl_tokens": 1}]), "isl", "mean"),
    "a target below zero": (CLUSTER, workload(itl_ms=-5), "itl_ms", "-5"),
    "a target that nothing meets": (CLUSTER, workload(itl_ms=0.01), "no placement", "relax"),
    "an objective that is none": (CLUSTER, workload(objective="speed"), "objective", "speed"),
    "more than memory holds": (
        CLUSTER,
        workload(requests=[{"isl_tokens": 9_000_000, "osl_tokens": 9_000_000}]),
        "does not fit into",
        "shorten",
    ),
    "weights that fit nowhere": (
        {"nodes": [{"accelerator": "n300", "count": 1, "accelerators": 1}]},
        WORKLOAD,
        "n300",
        "fit",
    ),
    "a price that is unknown": (
        {"nodes": [{"accelerator": "mi308x", "count": 1}]},
        workload(objective="price"),
        "price of mi308x",
        "price_usd_per_h",
    ),
    "no YAML": ("nodes: [", WORKLOAD, "not YAML", "line 1"),
    "a key twice": ("nodes: []\nnodes: []\n", WORKLOAD, "'nodes' is given twice", "line 2"),
    "a date that is none": ("nodes: 2024-13-45\n", WORKLOAD, "cannot read", "month"),
    "a tag that is not so": ("nodes: !!timestamp now\n", WORKLOAD, "YAML cannot read"),
    "a number of 5000 digits": (f"nodes: {'9' * 5000}\n", WORKLOAD, "YAML cannot read", "digits"),
    "nested without end": ("[" * 5000, WORKLOAD, "nested too deeply"),
    "a switch for a number": (cluster(count=True), WORKLOAD, "count", "yes"),
    "no mapping": ("- 1", WORKLOAD, "no mapping", "list"),
    "a trace that is not there": (CLUSTER, workload(requests=None, trace="x.jsonl"), "x.jsonl", "read"),
    "a profile that is not there": (cluster(accelerator="own.yaml"), WORKLOAD, "own.yaml", "cannot read"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_an_error_that_names_it_and_never_a_traceback(tmp_path: Path, case: str) -> None:
    given, asked, *expected = BAD[case]
    found = run(tmp_path, given, asked)
    assert found.exit_code == 2, found.output
    assert isinstance(found.exception, SystemExit)
    assert "Traceback" not in found.output
    for text in expected:
        assert text in found.stderr


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("empty.jsonl", "", "is empty"),
        ("empty.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "is empty"),
        (
            "bad.jsonl",
            '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": []}\n{}\n',
            "line 2",
        ),
        ("worse.jsonl", "what?\n", "line 1"),
        ("deep.jsonl", "[" * 200_000, "line 1"),
        ("bad.csv", "TIMESTAMP,ContextTokens\n1,2\n", "GeneratedTokens"),
    ],
)
def test_a_trace_without_requests_or_with_bad_ones_is_refused_by_its_line(
    tmp_path: Path, name: str, text: str, expected: str
) -> None:
    (tmp_path / name).write_text(text)
    found = run(tmp_path, CLUSTER, workload(requests=None, trace=name))
    assert found.exit_code == 2
    assert isinstance(found.exception, SystemExit)
    assert expected in found.stderr


def test_a_negative_figure_in_a_profile_of_ones_own_is_refused(tmp_path: Path) -> None:
    source = "{value: -1.0e+12, source: mine}"
    (tmp_path / "own.yaml").write_text(
        f"name: own\nvendor: x\nformats: [bf16]\nfigures: {{memory_bytes_per_s: {source}}}\n"
    )
    found = run(tmp_path, cluster(accelerator="own.yaml"))
    assert found.exit_code == 2
    assert isinstance(found.exception, SystemExit)
    assert "memory_bytes_per_s" in found.stderr


def test_constants_of_ones_own_measurements_are_taken_and_bad_ones_refused(tmp_path: Path) -> None:
    measured = tmp_path / "measured.csv"
    header = "accelerator,model,framework,precision,tp,concurrency,isl,osl,tpot_s_p50,ttft_s_p50,e2el_s_p50"
    rows = [
        f"mi300x,gpt-oss-120b,vllm,fp4,8,{c},2048,128,{0.004 + c * 4e-5},{0.06 + c * 1e-3},{0.6 + c * 7e-3}"
        for c in (1, 4, 16, 64)
    ]
    measured.write_text("\n".join([header, *(row.replace(",8,", ",8,", 1) for row in rows)]))
    own = tmp_path / "own.yaml"
    made = CliRunner().invoke(app, ["calibrate", str(measured), "--out", str(own)])
    assert made.exit_code == 0, made.output
    pinned = {"nodes": [{**CLUSTER["nodes"][1], "tp": [8]}]}
    sources = []
    for more in ([], ["--constants", str(own)]):
        found = run(tmp_path, pinned, WORKLOAD, "--json", *more)
        assert found.exit_code == 0, found.output
        sources.append(json.loads(found.stdout)["node_types"][0]["roles"]["prefill"]["constants"])
    assert "from specification" in sources[0]
    assert "4 measurements of mi300x gpt-oss-120b" in sources[1]
    own.write_text("format: 2\n")
    refused = run(tmp_path, pinned, WORKLOAD, "--constants", str(own))
    assert (refused.exit_code, "holds no constants" in refused.stderr) == (2, True)


def test_both_trace_formats_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"timestamp": 0, "input_length": 500, "output_length": 50, "hash_ids": [1]}\n' * 9
    )
    (tmp_path / "a.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46.6805900,500,50\n" * 9
    )
    mixes = []
    for name in ("a.jsonl", "a.csv"):
        found = run(tmp_path, CLUSTER, workload(requests=None, trace=name), "--json")
        assert found.exit_code == 0, found.output
        mixes.append(json.loads(found.stdout)["mix"])
    assert mixes[0] == mixes[1]
    assert (mixes[0]["isl_tokens"], mixes[0]["osl_tokens"]) == (500, 50)


def test_the_same_inputs_and_seed_give_the_same_bytes_and_a_mix_is_accepted(tmp_path: Path) -> None:
    mixed = yaml.safe_load((EXAMPLES / "mixed.yaml").read_text())
    once, again = (run(tmp_path, CLUSTER, mixed, "--json", "--seed", "7") for _ in range(2))
    assert once.exit_code == 0, once.output
    assert once.stdout_bytes == again.stdout_bytes
    plan = json.loads(once.stdout)
    assert plan["recommended"]["simulated"]["within_targets"]
    assert plan["recommended"]["requests_per_s"]["p90"] < plan["recommended"]["requests_per_s"]["p50"]
    rates = [option["output_tokens_per_s"]["p50"] for option in plan["pareto"]]
    assert rates == sorted(rates)


def test_the_plan_is_told_drawn_and_ready_to_be_rehearsed(tmp_path: Path) -> None:
    html, cluster_out = tmp_path / "report.html", tmp_path / "up.yaml"
    long = yaml.safe_load((EXAMPLES / "long-prompts.yaml").read_text())
    two = yaml.safe_load((EXAMPLES / "two-vendors.yaml").read_text())
    pinned = {"nodes": [{**each, "tp": [8], "count": 1} for each in two["nodes"]]}
    found = run(tmp_path, pinned, long, "--html", str(html), "--cluster", str(cluster_out))
    assert found.exit_code == 0, found.output
    assert "Disaggregate" in found.stdout
    assert "One more server" in found.stdout
    page = html.read_text()
    assert page.count("<svg") >= 3
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)", page)
    made = spec.load(cluster_out)
    assert (made.engine, made.planner.mode) == ("sim", "disaggregated")
    assert sorted((worker.role, worker.vendor) for worker in made.workers) == [("decode", "amd"), ("prefill", "nvidia")]


def test_aggregated_is_recommended_plainly_where_it_is_better(tmp_path: Path) -> None:
    answers = yaml.safe_load((EXAMPLES / "long-answers.yaml").read_text())
    cluster_out = tmp_path / "up.yaml"
    pinned = {"nodes": [{**each, "tp": [8]} for each in CLUSTER["nodes"]]}
    found = run(tmp_path, pinned, answers, "--cluster", str(cluster_out))
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("Stay aggregated: ")
    made = spec.load(cluster_out)
    assert made.planner.mode == "aggregated"
    assert all(node.relay is None for node in made.nodes)


@pytest.mark.parametrize(("isl", "osl", "count"), [(1, 1, 1), (1, 1_000_000, 1), (100_000, 2, 1), (1024, 1024, 4096)])
def test_extreme_but_possible_requests_get_a_plan(tmp_path: Path, isl: int, osl: int, count: int) -> None:
    asked = {"model": "gpt-oss-120b", "requests": [{"isl_tokens": isl, "osl_tokens": osl}]}
    found = run(tmp_path, {"nodes": [{**each, "count": count} for each in CLUSTER["nodes"]]}, asked, "--json")
    assert found.exit_code == 0, found.output
    plan = json.loads(found.stdout)
    assert plan["recommended"]["requests_per_s"]["p50"] > 0
    assert (plan["recommended"]["simulated"] is None) == (count == 4096)


def test_what_must_be_served_is_served_by_the_cheapest_servers_or_said_to_be_too_much(tmp_path: Path) -> None:
    many = {"nodes": [{**each, "count": 6} for each in CLUSTER["nodes"]]}
    enough = run(tmp_path, many, workload(objective="price", requests_per_s=20), "--json")
    assert enough.exit_code == 0, enough.output
    plan = json.loads(enough.stdout)
    assert plan["recommended"]["requests_per_s"]["p50"] >= 20 * (1 - 1e-6)
    whole = run(tmp_path, many, workload(objective="throughput"), "--json")
    assert plan["recommended"]["usd_per_h"] < json.loads(whole.stdout)["recommended"]["usd_per_h"]
    too_much = run(tmp_path, many, workload(objective="price", requests_per_s=1e9))
    assert too_much.exit_code == 0
    assert "of the 1e+09 requests per second that are wanted" in " ".join(too_much.stdout.split())


def test_a_plan_that_one_machine_cannot_rehearse_says_so(tmp_path: Path) -> None:
    found = run(tmp_path, cluster(count=80), WORKLOAD, "--cluster", str(tmp_path / "up.yaml"))
    assert found.exit_code == 2
    assert "at most 64" in found.stderr


def test_a_report_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    found = run(tmp_path, CLUSTER, WORKLOAD, "--html", str(tmp_path / "no" / "such" / "folder.html"))
    assert found.exit_code == 2
    assert "cannot be written" in found.stderr


def test_published_results_are_reproduced_from_the_command_line() -> None:
    found = CliRunner().invoke(app, ["reproduce"])
    assert found.exit_code == 0, found.output
    assert "not met" not in found.stdout
    assert "not a proven cause" in found.stdout.replace("\n", " ")
