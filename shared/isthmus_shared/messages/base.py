"""Wire form of a message: a msgpack map of the model's fields plus `kind`, `v` and, where it is another, `min`.

A receiver names the type that it expects, so a wrong kind, a version that it cannot read, an unknown field or a missing
one is a `ProtocolViolation` that says which; nothing is guessed. Two releases may run side by side (ADR 9): a receiver
reads its own version and the previous one, and a later one whose sender says (`min`) that it only added to what the
receiver knows.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import msgpack
from pydantic import BaseModel, ConfigDict, ValidationError

from isthmus_shared.errors import ProtocolViolation

VERSION = 2
"""Of all messages. Raised by a release that says something the one before would refuse."""
PREVIOUS = 1
"""What is read besides; every field that came with `VERSION` has a default."""


class WireMessage(BaseModel):
    """Base of all messages. Subclasses set `KIND` (unique)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    KIND: ClassVar[str] = ""

    def encode(self) -> bytes:
        fields = self.model_dump(mode="python", exclude_none=True)
        packed: bytes = msgpack.packb({"kind": self.KIND, "v": VERSION, **fields})
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Self:
        fields = unpack_map(data, what=cls.KIND)
        kind, version, least = fields.pop("kind", None), fields.pop("v", None), fields.pop("min", None)
        if kind != cls.KIND:
            raise ProtocolViolation(f"message of kind {kind!r} where {cls.KIND!r} was expected")
        _require_readable(cls.KIND, version, least)
        try:
            return cls.model_validate(fields, extra="ignore" if version > VERSION else None)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ProtocolViolation(f"message {cls.KIND!r}, field {where!r}: {first['msg']}") from error


def _require_readable(kind: str, version: Any, least: Any) -> None:
    if type(version) is int and type(least) in (int, type(None)):
        if version in (VERSION, PREVIOUS) and least in (None, version):
            return
        if version > VERSION and least is not None and least <= VERSION:
            return
    raise ProtocolViolation(
        f"message {kind!r} has version {version!r}" + ("" if least is None else f", readable from {least!r} on"),
        why=f"this process reads versions {PREVIOUS} and {VERSION}",
        todo="upgrade one release at a time, the new one with ISTHMUS_WIRE_VERSION set to the old one's",
    )


def unpack_map(data: bytes, *, what: str) -> dict[str, Any]:
    """A msgpack map with string keys, or `ProtocolViolation`."""
    try:
        fields = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolViolation(f"{what}: not msgpack: {error}") from error
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise ProtocolViolation(f"{what}: not a map with string keys")
    return fields
