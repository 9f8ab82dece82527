from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from isthmus_shared.log import configure_logging


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def configured(format: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure_logging(level=level, format=format, service="svc", instance="i1", incarnation="abc", stream=stream)
    return stream


def test_a_json_line_carries_event_fields_and_identity() -> None:
    stream = configured("json")
    structlog.get_logger().info("transfer.completed", kv_bytes=7)
    line = json.loads(stream.getvalue())
    assert line["event"] == "transfer.completed"
    assert (line["kv_bytes"], line["level"]) == (7, "info")
    assert (line["service"], line["instance"], line["incarnation"]) == ("svc", "i1", "abc")
    assert line["timestamp"].endswith("Z")


def test_the_standard_librarys_log_comes_out_the_same_way() -> None:
    stream = configured("json")
    logging.getLogger("uvicorn.error").warning("started on %s", "x")
    line = json.loads(stream.getvalue())
    assert (line["event"], line["logger"], line["service"]) == ("started on x", "uvicorn.error", "svc")


def test_what_is_below_the_level_is_left_out() -> None:
    stream = configured("json", level="warning")
    structlog.get_logger().info("quiet")
    logging.getLogger("x").info("quiet")
    structlog.get_logger().warning("loud")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["loud"]


@pytest.mark.parametrize("format", ["json", "console"])
def test_a_traceback_is_logged_on_both_forms(format: str) -> None:
    stream = configured(format)
    try:
        raise ZeroDivisionError("a bug")
    except ZeroDivisionError:
        structlog.get_logger().exception("service.handler_failed")
    text = stream.getvalue()
    assert "ZeroDivisionError: a bug" in text
    assert "test_log.py" in text
    if format == "json":
        assert len(text.splitlines()) == 1


def test_the_console_form_is_not_json() -> None:
    stream = configured("console")
    structlog.get_logger().info("service.started", port=1)
    assert "service.started" in stream.getvalue()
    assert "port=1" in stream.getvalue()
    assert not stream.getvalue().startswith("{")
