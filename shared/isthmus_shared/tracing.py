"""Traces of requests: a port with nothing behind it, unless an OTLP endpoint is configured (docs/tracing.md).

A span's `traceparent` (W3C Trace Context, https://www.w3.org/TR/trace-context/) travels in the headers of bus messages.
Where tracing is off no header is written, no span is made and OpenTelemetry is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Protocol

from structlog.typing import FilteringBoundLogger

HEADER = "traceparent"
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

Attribute = str | int | float | bool

incoming: ContextVar[str] = ContextVar("incoming_traceparent", default="")
"""The traceparent of the bus request that this task answers; empty where it had none, or a bad one."""


class Span(Protocol):
    @property
    def traceparent(self) -> str:
        """What children elsewhere name as their parent; empty when nothing is traced."""
        ...

    @property
    def headers(self) -> Mapping[str, str] | None:
        """For a bus message."""
        ...

    def event(self, name: str, *, at_s: float | None = None, **attributes: Attribute) -> None: ...

    def end(self, *, at_s: float | None = None, error: str = "", **attributes: Attribute) -> None:
        """The first call counts. `error`: a code, and the span is one of a failure."""
        ...


class Tracing(Protocol):
    @property
    def enabled(self) -> bool: ...

    def now_s(self) -> float:
        """The clock of `start_s` and `at_s`; monotonic, and may be read from any thread."""
        ...

    def begin(self, name: str, parent: str = "", *, start_s: float | None = None, **attributes: Attribute) -> Span:
        """A span that began at `start_s` (now). `parent`: a traceparent; an invalid one counts as none."""
        ...

    def close(self) -> None:
        """Sends what is left. May block for some seconds: call it off the event loop."""
        ...


class NullSpan:
    traceparent = ""
    headers = None

    def event(self, name: str, *, at_s: float | None = None, **attributes: Attribute) -> None:
        """Nothing is traced."""

    def end(self, *, at_s: float | None = None, error: str = "", **attributes: Attribute) -> None:
        """Nothing is traced."""


class NullTracing:
    enabled = False

    def now_s(self) -> float:
        return 0.0

    def begin(self, name: str, parent: str = "", *, start_s: float | None = None, **attributes: Attribute) -> Span:
        return NULL_SPAN

    def close(self) -> None:
        """Nothing is open."""


NULL_SPAN = NullSpan()


def parse_traceparent(text: str) -> tuple[int, int, int] | None:
    """(trace id, parent's span id, flags), or None for what the specification calls invalid."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id, flags = int(found[2], 16), int(found[3], 16), int(found[4], 16)
    return (trace_id, span_id, flags) if trace_id and span_id else None


def checked(traceparent: str | None) -> str:
    """It, or nothing if it is not a valid one."""
    return traceparent if traceparent and parse_traceparent(traceparent) is not None else ""


def open_tracing(endpoint: str | None, *, service: str, instance: str, log: FilteringBoundLogger) -> Tracing:
    """What exports to that endpoint; where OpenTelemetry is not installed it is said once, and serving goes on."""
    if not endpoint:
        return NullTracing()
    try:
        from isthmus_shared.tracing_otel import otlp_tracing
    except ModuleNotFoundError as error:
        log.warning("tracing.unavailable", why=str(error), todo="pip install 'isthmus[tracing]'")
        return NullTracing()
    return otlp_tracing(endpoint, service=service, instance=instance)
