"""Length-prefixed frames over a byte stream: four bytes big-endian, then that many bytes; never more than a bound."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from isthmus_shared.errors import Fault, ProtocolViolation
from isthmus_shared.messages.base import unpack_map

_PREFIX = struct.Struct("!I")
PREFIX_BYTES = _PREFIX.size
MAX_FAULT_TEXT = 1_000
"""Characters of each text of a fault that travels; a longer one is cut, so that a fault always fits its frame."""

Name = Annotated[str, Field(min_length=1, max_length=200)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
MAX_INTERVAL_S = 3_600.0
Interval = Annotated[float, Field(gt=0, le=MAX_INTERVAL_S)]
Generation32 = Annotated[int, Field(gt=0, lt=2**32)]
M = TypeVar("M", bound=BaseModel)


class Frame(BaseModel):
    """Base of what goes into frames. `kind` tells them apart."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str


def cut(fault: Fault) -> Fault:
    """The fault with its texts bounded."""
    texts = {
        name: text[:MAX_FAULT_TEXT]
        for name in ("code", "what", "why", "todo", "param")
        if (text := getattr(fault, name)) is not None
    }
    return fault.model_copy(update=texts)


def prefixed(payload: bytes) -> bytes:
    return _PREFIX.pack(len(payload)) + payload


def length_of(prefix: bytes, *, limit: int) -> int:
    length: int = _PREFIX.unpack(prefix)[0]
    if length > limit:
        raise ProtocolViolation(f"a frame of {length} bytes where {limit} is the most")
    return length


def pack(frame: BaseModel) -> bytes:
    packed: bytes = msgpack.packb(frame.model_dump(mode="python", exclude_none=True))
    return packed


def unpack(data: bytes, adapter: TypeAdapter[M], *, what: str) -> M:
    """The frame, or `ProtocolViolation` naming the first field that is wrong."""
    fields = unpack_map(data, what=what)
    try:
        return adapter.validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolViolation(f"{what}, field {where!r}: {first['msg']}") from error


class FrameReader:
    """Cuts a stream into frames; holds at most one unfinished frame."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while len(self._buffer) >= PREFIX_BYTES:
            end = PREFIX_BYTES + length_of(bytes(self._buffer[:PREFIX_BYTES]), limit=self._limit)
            if len(self._buffer) < end:
                return
            frame = bytes(self._buffer[PREFIX_BYTES:end])
            del self._buffer[:end]
            yield frame
