from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import structlog

from isthmus_shared.config import ServiceConfig
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.tracing import NullTracing, checked, open_tracing

VALID = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Collector(BaseHTTPRequestHandler):
    got: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        self.got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def test_spans_reach_a_collector_by_the_time_the_process_has_closed() -> None:
    pytest.importorskip("opentelemetry.sdk")
    got: list[tuple[str, bytes]] = []
    server = HTTPServer(("127.0.0.1", 0), type("Bound", (Collector,), {"got": got}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/"
        tracing = open_tracing(url, service="ingress", instance="i", log=structlog.get_logger())
        span = tracing.begin("request", VALID, endpoint="chat")
        assert span.headers == {"traceparent": span.traceparent}
        assert span.traceparent.split("-")[1] == VALID.split("-")[1]
        span.end()
        tracing.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    ((path, body),) = got
    assert path == "/v1/traces"
    assert b"isthmus-ingress" in body
    assert bytes.fromhex(VALID.split("-")[1]) in body


def test_an_endpoint_without_opentelemetry_costs_the_traces_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isthmus_shared.tracing_otel", None)
    with structlog.testing.capture_logs() as logs:
        tracing = open_tracing("http://127.0.0.1:4318", service="s", instance="i", log=structlog.get_logger())
    assert not tracing.enabled
    assert [(entry["event"], entry["todo"]) for entry in logs] == [
        ("tracing.unavailable", "pip install 'isthmus[tracing]'")
    ]


def test_without_an_endpoint_nothing_is_traced() -> None:
    tracing = open_tracing(None, service="s", instance="i", log=structlog.get_logger())
    assert isinstance(tracing, NullTracing)
    assert tracing.begin("request", VALID).headers is None


def test_the_standard_variable_is_read_and_a_bad_endpoint_refused() -> None:
    standard = "OTEL_EXPORTER_OTLP_ENDPOINT"
    assert ServiceConfig.load({standard: "http://a:4318"}).otlp_endpoint == "http://a:4318"
    both = {standard: "http://a:4318", "ISTHMUS_OTLP_ENDPOINT": "https://b"}
    assert ServiceConfig.load(both).otlp_endpoint == "https://b"
    with pytest.raises(ConfigInvalid, match="ISTHMUS_OTLP_ENDPOINT"):
        ServiceConfig.load({"ISTHMUS_OTLP_ENDPOINT": "a:4318"})


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        (VALID, True),
        (VALID[:-2] + "00", True),
        ("cc" + VALID[2:] + "-more", True),
        (VALID + "-more", False),
        ("ff" + VALID[2:], False),
        (VALID.upper(), False),
        ("00-" + "0" * 32 + VALID[35:], False),
        (VALID[:36] + "0" * 16 + "-01", False),
        (VALID + "\n", False),
        ("", False),
        (None, False),
    ],
)
def test_a_traceparent_is_taken_as_the_specification_has_it(given: str | None, valid: bool) -> None:
    assert checked(given) == (given if valid else "")
