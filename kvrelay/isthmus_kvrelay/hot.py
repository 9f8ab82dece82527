"""The four frames that a small transfer's time depends on, packed by hand: a fifth of msgpack's and pydantic's time.

    0  c  tag, below the first byte that a msgpack map can have
    1     numbers, big-endian, as the frame's `_NUMBERS` say
    -     texts: H bytes, then UTF-8
    -     the rest: indices or grants

What comes is checked as the other frames are: each field's bounds, and nothing left over.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, TypeVar

from isthmus_kvrelay.core.names import FlowKey, Grant, Offer, SlotUse
from isthmus_shared.errors import ProtocolViolation
from isthmus_shared.ids import Generation, Incarnation, TransferId

MAX_DURATION_S = 86_400.0
MAX_TEXT_CHARS = 200
MAX_ADDRESS_CHARS = 1_000
MAX_COUNT = 2**63 - 1
MAX_32 = 2**32 - 1

_LENGTH = struct.Struct("!H")
_GRANT = struct.Struct("!IIQ")
GRANT_BYTES = _GRANT.size
_INDEX_BYTES = 4


class FilledNotice(NamedTuple):
    """Client → relay: these chunks are filled."""

    transfer_id: TransferId
    generation: Generation
    chunks: bytes
    """Indices, four bytes each."""

    @property
    def kind(self) -> str:
        return "filled"

    @property
    def key(self) -> FlowKey:
        return FlowKey(self.transfer_id, self.generation)

    def packed(self) -> bytes:
        return _FILLED.pack(FILLED, self.generation) + _texts(self.transfer_id) + self.chunks

    def problem(self) -> tuple[str, str] | None:
        return _bad_text(transfer_id=self.transfer_id) or _bad_number(1, MAX_32, generation=self.generation)


class OpenSourceRequest(NamedTuple):
    """Client → relay: fetch that transfer."""

    transfer_id: TransferId
    generation: Generation
    peer: Incarnation
    """The source's relay."""
    address: str
    total_bytes: int
    manifest: str
    deadline_s: float
    pull: int
    kv_tokens: int
    """Tokens whose KV the consumer's engine will hold."""

    @property
    def kind(self) -> str:
        return "open_source"

    @property
    def key(self) -> FlowKey:
        return FlowKey(self.transfer_id, self.generation)

    def packed(self) -> bytes:
        numbers = self.generation, self.pull, self.total_bytes, self.kv_tokens, self.deadline_s
        texts = _texts(self.transfer_id, self.peer, self.address, self.manifest)
        return _OPEN_SOURCE.pack(OPEN_SOURCE, *numbers) + texts

    def problem(self) -> tuple[str, str] | None:
        """The first field that the protocol does not carry, and what is wrong with it."""
        late = None if 0 < self.deadline_s <= MAX_DURATION_S else ("deadline_s", f"not in (0, {MAX_DURATION_S:g}]")
        return (
            _bad_text(transfer_id=self.transfer_id, peer=self.peer, manifest=self.manifest)
            or _bad_number(0, MAX_ADDRESS_CHARS, address=len(self.address))
            or _bad_number(1, MAX_32, generation=self.generation, pull=self.pull)
            or _bad_number(0, MAX_COUNT, total_bytes=self.total_bytes, kv_tokens=self.kv_tokens)
            or late
        )


class SourceReadyNotice(NamedTuple):
    """Relay → client: all of it is there."""

    transfer_id: TransferId
    generation: Generation
    pull: int
    slots: bytes
    """Indices, four bytes each."""
    chunk_bytes: int

    @property
    def kind(self) -> str:
        return "source_ready"

    @property
    def key(self) -> FlowKey:
        return FlowKey(self.transfer_id, self.generation)

    def packed(self) -> bytes:
        numbers = self.generation, self.pull, self.chunk_bytes
        return _SOURCE_READY.pack(SOURCE_READY, *numbers) + _texts(self.transfer_id) + self.slots

    def problem(self) -> tuple[str, str] | None:
        return (
            _bad_text(transfer_id=self.transfer_id)
            or _bad_number(1, MAX_32, generation=self.generation, pull=self.pull)
            or _bad_number(0, MAX_COUNT, chunk_bytes=self.chunk_bytes)
        )


class EagerPull(NamedTuple):
    """Consumer's relay → source's: I want that transfer, and here is credit for its first chunks; it counts if the
    transfer is what is said here, and cut so."""

    key: FlowKey
    pull: int
    offer: Offer

    @property
    def kind(self) -> str:
        return "eager_pull"

    def packed(self) -> bytes:
        numbers = self.key.generation, self.pull, self.offer.total_bytes, self.offer.chunk_bytes
        texts = _texts(self.key.transfer_id, self.offer.manifest)
        return _EAGER_PULL.pack(EAGER_PULL, *numbers) + texts + pack_grants(self.offer.grants)

    def problem(self) -> tuple[str, str] | None:
        key, offer = self.key, self.offer
        return (
            _bad_text(transfer_id=key.transfer_id, manifest=offer.manifest)
            or _bad_number(1, MAX_32, generation=key.generation, pull=self.pull)
            or _bad_number(0, MAX_COUNT, total_bytes=offer.total_bytes, chunk_bytes=offer.chunk_bytes)
        )


Hot = FilledNotice | OpenSourceRequest | SourceReadyNotice | EagerPull
H = TypeVar("H", FilledNotice, OpenSourceRequest, SourceReadyNotice, EagerPull)

FILLED, OPEN_SOURCE, SOURCE_READY, EAGER_PULL = b"\1", b"\2", b"\3", b"\4"
_FILLED = struct.Struct("!cI")
_OPEN_SOURCE = struct.Struct("!cIIQQd")
_SOURCE_READY = struct.Struct("!cIIQ")
_EAGER_PULL = struct.Struct("!cIIQQ")


def read_filled(data: bytes) -> FilledNotice:
    _, generation = _numbers(_FILLED, data)
    at, transfer = _text(data, _FILLED.size)
    return _checked(FilledNotice(TransferId(transfer), Generation(generation), _indices(data, at)))


def read_open_source(data: bytes) -> OpenSourceRequest:
    _, generation, pull, total_bytes, kv_tokens, deadline_s = _numbers(_OPEN_SOURCE, data)
    at, transfer = _text(data, _OPEN_SOURCE.size)
    at, peer = _text(data, at)
    at, address = _text(data, at)
    at, manifest = _text(data, at)
    if at != len(data):
        raise ProtocolViolation("a frame with something left over")
    names = TransferId(transfer), Generation(generation), Incarnation(peer), address
    return _checked(OpenSourceRequest(*names, total_bytes, manifest, deadline_s, pull, kv_tokens))


def read_source_ready(data: bytes) -> SourceReadyNotice:
    _, generation, pull, chunk_bytes = _numbers(_SOURCE_READY, data)
    at, transfer = _text(data, _SOURCE_READY.size)
    names = TransferId(transfer), Generation(generation), pull
    return _checked(SourceReadyNotice(*names, _indices(data, at), chunk_bytes))


def read_eager_pull(data: bytes) -> EagerPull:
    _, generation, pull, total_bytes, chunk_bytes = _numbers(_EAGER_PULL, data)
    at, transfer = _text(data, _EAGER_PULL.size)
    at, manifest = _text(data, at)
    grants = unpack_grants(data[at:])
    key = FlowKey(TransferId(transfer), Generation(generation))
    return _checked(EagerPull(key, pull, Offer(total_bytes, chunk_bytes, manifest, grants)))


def pack_grants(grants: tuple[Grant, ...]) -> bytes:
    return b"".join(_GRANT.pack(grant.chunk, *grant.into) for grant in grants)


def unpack_grants(packed: bytes) -> tuple[Grant, ...]:
    if len(packed) % GRANT_BYTES:
        raise ProtocolViolation("credit that ends within a grant")
    return tuple(Grant(chunk, SlotUse(slot, use)) for chunk, slot, use in _GRANT.iter_unpack(packed))


def _checked(frame: H) -> H:
    problem = frame.problem()
    if problem is not None:
        raise ProtocolViolation(f"{frame.kind}, field {problem[0]!r}: {problem[1]}")
    return frame


def _texts(*texts: str) -> bytes:
    encoded = [text.encode() for text in texts]
    return b"".join(_LENGTH.pack(len(each)) + each for each in encoded)


def _numbers(layout: struct.Struct, data: bytes) -> tuple[Any, ...]:
    if len(data) < layout.size:
        raise ProtocolViolation("a frame that ends within its numbers")
    return layout.unpack_from(data)


def _text(data: bytes, at: int) -> tuple[int, str]:
    """Where it ends, and the text."""
    start = at + _LENGTH.size
    if start > len(data):
        raise ProtocolViolation("a frame that ends within a text")
    end = start + _LENGTH.unpack_from(data, at)[0]
    if end > len(data):
        raise ProtocolViolation("a frame that ends within a text")
    try:
        return end, data[start:end].decode()
    except UnicodeDecodeError as error:
        raise ProtocolViolation("a frame whose text is not UTF-8") from error


def _indices(data: bytes, at: int) -> bytes:
    if (len(data) - at) % _INDEX_BYTES:
        raise ProtocolViolation("a list of indices that ends within one")
    return data[at:]


def _bad_text(**texts: str) -> tuple[str, str] | None:
    for name, text in texts.items():
        if not 0 < len(text) <= MAX_TEXT_CHARS:
            return name, f"{len(text)} characters; 1 to {MAX_TEXT_CHARS} are allowed"
    return None


def _bad_number(least: int, most: int, **numbers: int) -> tuple[str, str] | None:
    for name, number in numbers.items():
        if not least <= number <= most:
            return name, f"{number} is not in {least} to {most}"
    return None
