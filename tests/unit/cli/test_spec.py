from __future__ import annotations

from pathlib import Path

import pytest

from isthmus_cli.spec import demo_text, load, parse
from isthmus_shared.errors import ConfigInvalid

MINIMAL = """\
nodes:
  - id: a
    workers:
      - id: w
        role: decode
"""


def test_the_demo_is_two_vendors_whose_kv_layouts_differ() -> None:
    spec = load(None)
    assert [(worker.role, worker.vendor, worker.kv_layout) for worker in spec.workers] == [
        ("prefill", "nvidia", "nhd:16:fp32"),
        ("decode", "amd", "hnd:64:fp32:packed4"),
    ]
    assert all(node.relay is not None for node in spec.nodes)
    assert len(spec.nodes) == 2


def test_one_node_holds_every_worker_when_asked_for() -> None:
    spec = load(None).on_one_node()
    assert [[worker.id for worker in node.workers] for node in spec.nodes] == [["prefill-a", "decode-b"]]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (MINIMAL.replace("role: decode", "role: decoder"), 5, ["nodes.0.workers.0.role", "decode", "'decoder'"]),
        (MINIMAL + "        vender: amd\n", 6, ["nodes.0.workers.0.vender", "not permitted"]),
        (MINIMAL.replace("        role: decode\n", ""), 4, ["nodes.0.workers.0.role", "required"]),
        (MINIMAL + "        kv_layout: nhd:0:fp32\n", 6, ["kv_layout", "nhd:0:fp32"]),
        (MINIMAL + "ingress: {port: 70000}\n", 6, ["ingress.port", "65535"]),
        (MINIMAL.replace("id: w", "id: W.1"), 4, ["nodes.0.workers.0.id"]),
        (MINIMAL.replace("role: decode", "role: prefill"), 1, ["no worker has role 'decode'"]),
        (MINIMAL + "  - id: b\n    workers: [{id: w, role: decode}]\n", 1, ["worker id 'w' is used twice"]),
        (MINIMAL.replace("id: w", "id: planner"), 1, ["worker id 'planner'", "another process"]),
        (MINIMAL.replace("id: w", "id: relay-a"), 1, ["worker id 'relay-a'", "another process"]),
        ("nodes:\n  - id: a\n   workers: []\n", 3, ["not YAML"]),
        ("engine: [\n", 2, ["not YAML"]),
    ],
)
def test_a_mistake_is_told_with_file_line_and_field(text: str, line: int, words: list[str]) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        parse(text, "my.yaml")
    assert f"my.yaml:{line}:" in caught.value.text
    for word in words:
        assert word in caught.value.text


def test_arguments_for_vllm_need_its_engine() -> None:
    text = MINIMAL + "        vllm: {dtype: float32}\n"
    with pytest.raises(ConfigInvalid, match="engine: vllm"):
        parse(text, "c.yaml")
    assert parse(text + "        engine: vllm\n", "c.yaml").workers[0].vllm == {"dtype": "float32"}


def test_a_mistake_within_a_list_does_not_count_as_a_short_list_too() -> None:
    with pytest.raises(ConfigInvalid) as caught:
        parse(MINIMAL.replace("role: decode", "role: decoder"), "my.yaml")
    assert caught.value.text.count("my.yaml") == 1
    with pytest.raises(ConfigInvalid, match=r"nodes: .*at least 1"):
        parse("nodes: []", "my.yaml")


def test_a_file_that_is_nested_without_end_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match=r"my\.yaml: nested too deeply"):
        parse("a: " + "[" * 5000, "my.yaml")


@pytest.mark.parametrize("text", ["", "just words", "- a\n- b\n"])
def test_a_file_that_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"my\.yaml: a cluster file is a mapping"):
        parse(text, "my.yaml")


def test_a_model_folder_is_found_from_where_the_file_lies(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(MINIMAL + "model: {path: ./model}\n", encoding="utf-8")
    assert load(file).model.path == tmp_path / "model"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"nowhere\.yaml cannot be read"):
        load(tmp_path / "nowhere.yaml")


def test_every_field_of_the_schema_is_in_the_demo_file() -> None:
    text = demo_text()
    for field in ("kv_blocks", "max_batch", "prefill_chunk_tokens", "threads", "pool_mib", "env", "path", "mode"):
        assert f"{field}:" in text
