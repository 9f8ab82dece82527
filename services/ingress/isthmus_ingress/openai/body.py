"""A request's bytes to a JSON object: bounded in depth, without duplicates, NaN or half characters."""

from __future__ import annotations

import json
from typing import Any

from isthmus_ingress.openai.errors import BODY
from isthmus_shared.errors import InvalidRequest

MAX_DEPTH = 64
"""Levels of nesting; no request that we know needs ten."""


def parse_object(data: bytes) -> dict[str, Any]:
    """The object, or `InvalidRequest` that says where and why."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            "the body is not UTF-8", why=f"byte {error.start} begins no character", param=BODY
        ) from error
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        where = f"{error.msg} at line {error.lineno}, column {error.colno} (character {error.pos})"
        raise InvalidRequest("the body is not JSON", why=where, param=BODY) from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:  # a number too long for Python to convert
        raise InvalidRequest("the body holds a number that can't be read", why=str(error), param=BODY) from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body is not a JSON object", param=BODY)
    check_tree(value)
    return value


def check_tree(value: Any) -> None:
    """Refuse what is nested too deeply and half surrogate pairs, which no tokenizer can read."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif isinstance(item, dict):
                below.extend(item.keys())
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(part for part in item if not isinstance(part, int))
        level = below


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        why = f"\\u{ord(text[error.start]):04x} is half of a surrogate pair"
        raise InvalidRequest("the body holds text that is not Unicode", why=why, param=BODY) from error


def _too_deep() -> InvalidRequest:
    return InvalidRequest("the body is nested too deeply", why=f"at most {MAX_DEPTH} levels are read", param=BODY)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest("the body names a field twice", why=f"field {twice[:64]!r}", param=twice[:64] or BODY)
    return found


def _no_constant(name: str) -> Any:
    raise InvalidRequest("the body is not JSON", why=f"{name} is not a JSON number", param=BODY)


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
