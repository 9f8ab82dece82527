"""Logging: events with fields, as JSON lines or for people. Set up once per process, by `run_service`."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
QUIET = ("nats", "asyncio", "httpx", "httpcore")
"""Libraries whose info lines say what our own events say; theirs start at warning."""


def configure_logging(
    *, level: str, format: str, service: str, instance: str, incarnation: str, stream: TextIO | None = None
) -> FilteringBoundLogger:
    """Route structlog and the standard library's logging to one handler, with the process' identity on each line."""
    identity = {"service": service, "instance": instance, "incarnation": incarnation}

    def add_identity(_logger: Any, _method: str, event: EventDict) -> EventDict:
        return {**identity, **event}

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_identity,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(format)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, LEVELS[level]))
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    log: FilteringBoundLogger = structlog.get_logger()
    return log


def _rendering(format: str) -> list[Processor]:
    if format == "console":
        return [structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)]
    return [
        structlog.processors.format_exc_info,
        structlog.processors.UnicodeDecoder(),
        structlog.processors.JSONRenderer(default=str, ensure_ascii=False),
    ]
