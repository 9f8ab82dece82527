"""Wire form of a message: a msgpack map of the model's fields plus `kind` and `v`.

A receiver names the type that it expects, so a wrong kind, another version, an unknown field or a missing one is a
`ProtocolViolation` that says which; nothing is guessed.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import msgpack
from pydantic import BaseModel, ConfigDict, ValidationError

from isthmus_shared.errors import ProtocolViolation


class WireMessage(BaseModel):
    """Base of all messages. Subclasses set `KIND` (unique) and `VERSION` (raised on an incompatible change)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    KIND: ClassVar[str] = ""
    VERSION: ClassVar[int] = 1

    def encode(self) -> bytes:
        fields = self.model_dump(mode="python", exclude_none=True)
        packed: bytes = msgpack.packb({"kind": self.KIND, "v": self.VERSION, **fields})
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Self:
        fields = unpack_map(data, what=cls.KIND)
        kind, version = fields.pop("kind", None), fields.pop("v", None)
        if kind != cls.KIND:
            raise ProtocolViolation(f"message of kind {kind!r} where {cls.KIND!r} was expected")
        if version != cls.VERSION:
            raise ProtocolViolation(
                f"message {cls.KIND!r} has version {version!r}",
                why=f"this process speaks version {cls.VERSION}",
                todo="run one release of Isthmus on all nodes",
            )
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ProtocolViolation(f"message {cls.KIND!r}, field {where!r}: {first['msg']}") from error


def unpack_map(data: bytes, *, what: str) -> dict[str, Any]:
    """A msgpack map with string keys, or `ProtocolViolation`."""
    try:
        fields = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolViolation(f"{what}: not msgpack: {error}") from error
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise ProtocolViolation(f"{what}: not a map with string keys")
    return fields
