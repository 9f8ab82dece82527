"""SLO classes: who is promised what."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus_ingress.slo import parse_classes, read_classes, with_header
from isthmus_shared.errors import ConfigInvalid, InvalidRequest

TEXT = """
# three of them
{"name": "fast", "ttft_s": 0.5, "itl_s": 0.05, "priority": 10}
{"name": "usual", "ttft_s": 5, "default": true}
{"name": "batch", "priority": -10}
"""
CLASSES = parse_classes(TEXT, "classes")


def name_of(asked: str, own: str, *, keyed: bool = False) -> str:
    slo = CLASSES.of(asked, own, keyed=keyed)
    return "" if slo is None else slo.name


def test_a_request_has_the_class_that_it_names_else_its_keys_else_the_default() -> None:
    assert name_of("", "") == "usual"
    assert name_of("", "batch") == "batch"
    assert name_of("batch", "usual") == "batch"
    assert name_of("fast", "") == "fast"
    fast = CLASSES.of("fast", "", keyed=False)
    assert fast is not None
    assert (fast.ttft_s, fast.itl_s, fast.priority) == (0.5, 0.05, 10)
    assert parse_classes("", "classes").of("", "gone") is None


def test_a_key_gets_no_higher_priority_than_its_own_class_has() -> None:
    with pytest.raises(InvalidRequest, match="may not ask"):
        CLASSES.of("fast", "batch")
    with pytest.raises(InvalidRequest, match="priority 0, that one 10"):
        CLASSES.of("fast", "")
    assert name_of("batch", "", keyed=True) == "batch"
    with pytest.raises(InvalidRequest, match="may not ask"):
        parse_classes('{"name": "fast", "priority": 1}', "classes").of("fast", "")
    with pytest.raises(InvalidRequest, match="known: batch, fast, usual"):
        CLASSES.of("faster", "")


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "not JSON"),
        ('{"name": "a", "ttft": 1}', "ttft"),
        ('{"name": "a", "ttft_s": 0}', "greater than 0"),
        ('{"name": "a b"}', "name"),
        ('{"name": "a", "priority": 101}', "priority"),
        ('{"name": "a"}\n{"name": "a"}', "named twice"),
        ("[]", "JSON|object|dictionary"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(line: str, wrong: str) -> None:
    with pytest.raises(ConfigInvalid, match=wrong) as caught:
        parse_classes(line, "classes")
    assert "classes:" in str(caught.value)


def test_a_file_that_cannot_be_read_and_a_tenant_without_its_class_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="cannot be had"):
        read_classes(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ConfigInvalid, match="cannot be had"):
        read_classes(tmp_path / "bytes")
    CLASSES.check_names([("a", "batch"), ("b", "")])
    with pytest.raises(ConfigInvalid, match="tenant 'c' has the SLO class 'gold'"):
        CLASSES.check_names([("c", "gold")])


def test_the_bodys_word_goes_before_the_headers() -> None:
    assert with_header({"slo_class": "a"}, "b") == {"slo_class": "a"}
    assert with_header({"model": "m"}, "b") == {"model": "m", "slo_class": "b"}
    assert with_header({"model": "m"}, None) == {"model": "m"}
