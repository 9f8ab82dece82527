"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import math
from typing import Any

from isthmus_shared.errors import InvalidRequest, IsthmusError, NoCapacity, Retry, Unavailable

DEFAULT_RETRY_AFTER_S = 1.0
"""For an error that may pass and names no time: two heartbeats, in which the cluster's view has been renewed."""


BODY = "body"
"""`param` of what is wrong with the body as a whole, and no field's fault."""


class Unauthorized(InvalidRequest):
    code, http_status = "invalid_api_key", 401


class NoSuchPath(InvalidRequest):
    code, http_status = "not_found", 404


class MethodNotAllowed(InvalidRequest):
    code, http_status = "method_not_allowed", 405


class UnsupportedMediaType(InvalidRequest):
    code, http_status = "unsupported_media_type", 415


class RequestTimeout(InvalidRequest):
    code, http_status = "request_timeout", 408


class HeadTooLarge(InvalidRequest):
    code, http_status = "headers_too_large", 431


class TooManyRequests(NoCapacity):
    """This ingress, not the workers, has as much as it takes."""

    code = "rate_limit_exceeded"


class TooManyConnections(Unavailable):
    code = "too_many_connections"


def internal_error(request_id: str) -> IsthmusError:
    """A bug of ours. What it was is in the log, and no business of the client's."""
    return IsthmusError("this server failed on the request", todo=f"tell its operator the request id {request_id}")


def error_type(error: IsthmusError) -> str:
    status = error.http_status
    if status == 429:
        return "rate_limit_error"
    if status == 401:
        return "authentication_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error_body(error: IsthmusError) -> dict[str, Any]:
    return {
        "error": {"message": error.text, "type": error_type(error), "param": error.param, "code": error.code},
    }


def error_json(error: IsthmusError) -> bytes:
    return json.dumps(error_body(error), separators=(",", ":")).encode()


def error_headers(error: IsthmusError) -> dict[str, str]:
    """Retry-After (whole seconds, as HTTP wants) for what may pass, and what a 401 or 405 must say."""
    headers: dict[str, str] = {}
    if error.http_status in (429, 503) and (isinstance(error, Unavailable) or error.retry is not Retry.NEVER):
        wait_s = DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_event(error: IsthmusError) -> bytes:
    """The end of a stream that had begun: an `error` event, and no `[DONE]` after it."""
    return b"event: error\ndata: " + error_json(error) + b"\n\n"
