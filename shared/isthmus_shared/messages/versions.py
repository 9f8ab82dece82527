"""Speaking as the release before: what a message is to those who have not been upgraded yet (ADR 9).

`previous.json` says what that release understands: its message kinds, and of each all fields, nested. It was taken from
that release's own schemas, so whatever is added since is left out without anybody having to think of it.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

import msgpack

from isthmus_shared.errors import ProtocolViolation
from isthmus_shared.messages.base import PREVIOUS, VERSION, unpack_map

Tree = dict[str, "Tree | None"]
"""Fields, and of those that have fields themselves (or hold a list of such) theirs."""


@functools.cache
def understood() -> dict[str, Tree]:
    """By kind."""
    text = resources.files(__package__).joinpath("previous.json").read_text(encoding="utf-8")
    known: dict[str, Tree] = json.loads(text)
    return known


def as_previous(data: bytes) -> bytes:
    """A message of ours as the release before would have said it. What it has no such message for, and what is no
    message (a client's body), stays as it is."""
    try:
        fields = unpack_map(data, what="message")
    except ProtocolViolation:
        return data
    kind, version = fields.pop("kind", None), fields.pop("v", None)
    known = understood().get(kind) if isinstance(kind, str) else None
    if known is None or version != VERSION:
        return data
    fields.pop("min", None)
    packed: bytes = msgpack.packb({"kind": kind, "v": PREVIOUS, **_only(fields, known)})
    return packed


def _only(fields: dict[str, Any], known: Tree) -> dict[str, Any]:
    return {name: _inside(value, known[name]) for name, value in fields.items() if name in known}


def _inside(value: Any, known: Tree | None) -> Any:
    if known is None:
        return value
    if isinstance(value, list):
        return [_inside(each, known) for each in value]
    return _only(value, known) if isinstance(value, dict) else value
