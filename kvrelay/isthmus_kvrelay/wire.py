"""What travels between two relays: a fixed binary header before everything, msgpack in control frames.

    0   4s  magic           36  16s digest of transfer id and generation
    4   B   version         52  I   generation
    5   B   type            56  8s  digest of the sender's incarnation
    6   H   zero            64  8s  digest of the receiver's incarnation
    8   I   payload bytes   72  Q   checksum of the payload
    12  I   chunk           80  end
    16  I   slot
    20  Q   use of the slot
    28  Q   offset in the flow

Big-endian. Chunk fields are zero in a control frame. The checksum is XXH3-64, seeded with what the chunk is said to
be, so that bytes of another transfer, generation or chunk never pass.

Chunks travel in trains. A train is a header of type TRAIN whose payload is the headers of 1 to `MAX_TRAIN_CHUNKS`
chunks, with no checksum in them; then their payloads in that order; then the payloads' checksums, 8 bytes each. So the
receiver knows where all of them go before the first comes, and either end passes over the bytes once, when it hashes
what it is about to send or has just received. Over verbs there are no trains: a chunk's header has its checksum.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Generic, Literal, TypedDict, TypeVar

import xxhash
from pydantic import BaseModel, Field, TypeAdapter

from isthmus_kvrelay.core.events import FlowKey, Grant, SlotUse
from isthmus_kvrelay.framing import Count, Frame, Generation32, Interval, Name, pack, unpack
from isthmus_kvrelay.hot import EAGER_PULL, GRANT_BYTES, pack_grants, read_eager_pull, unpack_grants
from isthmus_kvrelay.hot import EagerPull as EagerPull
from isthmus_shared.errors import Fault, ProtocolViolation
from isthmus_shared.ids import Generation, Incarnation, TransferId

MAGIC = b"ISTH"
VERSION = 3
_HEADER = struct.Struct("!4sBBHIIIQQ16sI8s8sQ")
HEADER_BYTES = _HEADER.size
MAX_CONTROL_BYTES = 1 << 20
"""Largest control payload; `MAX_GRANTS` grants need 512 KiB."""
MAX_GRANTS = 32_768
"""Grants in one Credit frame (8 GiB of KV at the default slot size); more go in further frames."""
MAX_TRAIN_CHUNKS = 64
"""Chunks in one train; with their headers far below the 1024 buffers that the kernel takes in one call."""
CHECKSUM_BYTES = 8
_MASK = 2**64 - 1
M = TypeVar("M", bound=BaseModel)


NO_SLOT = SlotUse(0, 0)


class FrameType(IntEnum):
    CONTROL = 1
    CHUNK = 2
    TRAIN = 3


_FRAMES = {frame.value: frame for frame in FrameType}


@dataclass(frozen=True, slots=True)
class Header:
    type: FrameType
    payload_bytes: int
    sender: bytes
    receiver: bytes
    checksum: int = 0
    chunk: int = 0
    into: SlotUse = NO_SLOT
    offset_bytes: int = 0
    flow: bytes = bytes(16)
    generation: int = 0

    def encode(self) -> bytes:
        return _HEADER.pack(
            MAGIC,
            VERSION,
            self.type,
            0,
            self.payload_bytes,
            self.chunk,
            self.into.slot,
            self.into.use,
            self.offset_bytes,
            self.flow,
            self.generation,
            self.sender,
            self.receiver,
            self.checksum,
        )

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview, *, limit: int) -> Header:
        """`limit`: the largest payload, in bytes, that the stream may carry."""
        if len(data) != HEADER_BYTES:
            raise ProtocolViolation(f"a header of {len(data)} bytes")
        magic, version, kind, zero, size, chunk, slot, use, offset, flow, gen, sender, receiver, check = _HEADER.unpack(
            data
        )
        if magic != MAGIC or version != VERSION or zero:
            raise ProtocolViolation("the peer does not speak this relay's protocol", todo="run one release everywhere")
        frame = _FRAMES.get(kind)
        if frame is None:
            raise ProtocolViolation(f"a frame of type {kind}")
        if size > limit:
            raise ProtocolViolation(f"a payload of {size} bytes where {limit} is the most")
        return cls(frame, size, sender, receiver, check, chunk, SlotUse(slot, use), offset, flow, gen)


def incarnation_digest(incarnation: Incarnation) -> bytes:
    return hashlib.blake2b(incarnation.encode(), digest_size=8).digest()


def flow_digest(key: FlowKey) -> bytes:
    return hashlib.blake2b(f"{key.generation}:{key.transfer_id}".encode(), digest_size=16).digest()


def seed_of(*, flow: bytes, chunk: int) -> int:
    """What a chunk's checksum starts from, by its flow's digest and its number."""
    return (int.from_bytes(flow[:8], "big") + chunk) & _MASK


def seeded_checksum(payload: memoryview | bytes | bytearray, seed: int) -> int:
    """XXH3-64; the GIL is released while it is computed."""
    value: int = xxhash.xxh3_64_intdigest(payload, seed=seed)
    return value


def checksum(payload: memoryview | bytes | bytearray, *, flow: bytes, chunk: int) -> int:
    return seeded_checksum(payload, seed_of(flow=flow, chunk=chunk))


# --- control frames -------------------------------------------------------------------------------------------------


class FlowNames(TypedDict):
    """What every frame about a transfer carries."""

    transfer_id: TransferId
    generation: Generation
    pull: int


def names_of(key: FlowKey, pull: int) -> FlowNames:
    return {"transfer_id": key.transfer_id, "generation": key.generation, "pull": pull}


class OfTransfer(Frame):
    """Base of what is said about one generation of a transfer."""

    transfer_id: Name
    generation: Generation32

    @property
    def key(self) -> FlowKey:
        return FlowKey(TransferId(self.transfer_id), Generation(self.generation))


class OfFlow(OfTransfer):
    """Base of what is said about one consumer's attempt to fetch it: what names an earlier one is late."""

    pull: Generation32


Grants = Annotated[bytes, Field(max_length=MAX_GRANTS * GRANT_BYTES)]


class Pull(OfFlow):
    """Consumer's relay → source's: I want that transfer."""

    kind: Literal["pull"] = "pull"


class Declined(OfFlow):
    """The answer to an eager pull whose credit will never be used. `Opened` follows as after a plain one."""

    kind: Literal["declined"] = "declined"


class Opened(OfFlow):
    """The answer: how it is cut, and what it holds."""

    kind: Literal["opened"] = "opened"
    total_bytes: Count
    chunk_bytes: Count
    manifest: Name


class Credit(OfFlow):
    """Consumer's relay → source's: these chunks may be sent, each into that slot."""

    kind: Literal["credit"] = "credit"
    packed: Grants

    @classmethod
    def batches(cls, key: FlowKey, pull: int, grants: tuple[Grant, ...]) -> Iterator[Credit]:
        for start in range(0, len(grants), MAX_GRANTS):
            yield cls(**names_of(key, pull), packed=pack_grants(grants[start : start + MAX_GRANTS]))

    def grants(self) -> tuple[Grant, ...]:
        return unpack_grants(self.packed)


class Done(OfFlow):
    """Consumer's relay → source's: taken; free it."""

    kind: Literal["done"] = "done"


class Abort(OfFlow):
    """Either way: the transfer is over."""

    kind: Literal["abort"] = "abort"
    fault: Fault


class Revoke(OfFlow):
    """Consumer's relay → source's: that pull is over and its slots are wanted back; answer when nothing moves."""

    kind: Literal["revoke"] = "revoke"
    fault: Fault


class Quiet(OfFlow):
    """The answer: no chunk of that pull leaves any more."""

    kind: Literal["quiet"] = "quiet"


class Feedback(Frame):
    """Consumer's relay → source's: how decode fares while you send."""

    kind: Literal["feedback"] = "feedback"
    itl_s: Interval
    target_s: Interval


class Ping(Frame):
    kind: Literal["ping"] = "ping"


class Pong(Frame):
    kind: Literal["pong"] = "pong"


ColdMessage = Pull | Declined | Opened | Credit | Done | Abort | Revoke | Quiet | Feedback | Ping | Pong
LaneMessage = ColdMessage | EagerPull
_ADAPTER: TypeAdapter[ColdMessage] = TypeAdapter(Annotated[ColdMessage, Field(discriminator="kind")])


def encode_control(message: BaseModel | EagerPull, *, sender: bytes, receiver: bytes) -> bytes:
    payload = message.packed() if isinstance(message, EagerPull) else pack(message)
    assert len(payload) <= MAX_CONTROL_BYTES
    check: int = xxhash.xxh3_64_intdigest(payload)
    return Header(FrameType.CONTROL, len(payload), sender, receiver, check).encode() + payload


class MessageReader(Generic[M]):
    """Cuts a control stream into messages; every frame must be from `sender` to `receiver`."""

    def __init__(self, adapter: TypeAdapter[M], *, sender: bytes, receiver: bytes) -> None:
        self._adapter, self._sender, self._receiver = adapter, sender, receiver
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[M | EagerPull]:
        self._buffer += data
        while len(self._buffer) >= HEADER_BYTES:
            header = Header.decode(self._buffer[:HEADER_BYTES], limit=MAX_CONTROL_BYTES)
            if header.type is not FrameType.CONTROL:
                raise ProtocolViolation("a chunk on a control stream")
            if (header.sender, header.receiver) != (self._sender, self._receiver):
                raise ProtocolViolation("a frame of another life of the peer, or for another life of this relay")
            end = HEADER_BYTES + header.payload_bytes
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[HEADER_BYTES:end])
            del self._buffer[:end]
            if xxhash.xxh3_64_intdigest(payload) != header.checksum:
                raise ProtocolViolation("a control frame arrived damaged")
            if payload[:1] == EAGER_PULL:
                yield read_eager_pull(payload)
            else:
                yield unpack(payload, self._adapter, what="lane message")


class ControlReader(MessageReader[ColdMessage]):
    """What every lane says."""

    def __init__(self, *, sender: bytes, receiver: bytes) -> None:
        super().__init__(_ADAPTER, sender=sender, receiver=receiver)
