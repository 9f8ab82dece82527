"""What travels between an engine's client and its relay over the unix socket. KV bytes never do.

The relay sends the pool's file descriptor with the first byte; then frames (`framing`) both ways: Hello, Welcome, and
what follows. A client's connection is its life: when it closes, the relay gives back what the client held.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal, TypedDict

from pydantic import Field, TypeAdapter

from isthmus_kvrelay.core.events import FlowKey
from isthmus_kvrelay.framing import Count, Frame, Generation32, Interval, Name, pack, prefixed, unpack
from isthmus_kvrelay.hot import (
    FILLED,
    MAX_DURATION_S,
    OPEN_SOURCE,
    SOURCE_READY,
    Hot,
    read_filled,
    read_open_source,
    read_source_ready,
)
from isthmus_kvrelay.hot import FilledNotice as FilledNotice
from isthmus_kvrelay.hot import OpenSourceRequest as OpenSourceRequest
from isthmus_kvrelay.hot import SourceReadyNotice as SourceReadyNotice
from isthmus_shared.errors import Fault, ProtocolViolation
from isthmus_shared.ids import Generation, TransferId
from isthmus_shared.messages.work import RelayRef, WorkerRef

PROTOCOL_VERSION = 3
FD_BYTE = b"P"
MAX_CLIENT_FRAME_BYTES = 1 << 20
"""Largest frame a client may send; the largest real one declares 65,536 chunks filled at once."""
MAX_RELAY_FRAME_BYTES = 16 << 20
"""Largest frame a relay may send: the slots of a flow of four million chunks."""
MAX_CHUNKS_PER_FRAME = 65_536
MAX_NAME_BYTES = 108
"""Of a unix socket's address."""
TOKEN_BYTES = 16

_INDEX = struct.Struct("!I")
MAX_FILLED_BYTES = MAX_CHUNKS_PER_FRAME * _INDEX.size
Seconds = Annotated[float, Field(gt=0, le=MAX_DURATION_S)]
Token = Annotated[bytes, Field(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
Indices = Annotated[bytes, Field(max_length=MAX_RELAY_FRAME_BYTES - 4_096)]


def pack_indices(indices: tuple[int, ...]) -> bytes:
    return struct.pack(f"!{len(indices)}I", *indices)


def unpack_indices(packed: bytes) -> tuple[int, ...]:
    if len(packed) % _INDEX.size:
        raise ProtocolViolation("a list of indices that ends within one")
    return struct.unpack(f"!{len(packed) // _INDEX.size}I", packed)


class FlowNames(TypedDict):
    """What every message about a transfer carries."""

    transfer_id: TransferId
    generation: Generation


def names_of(key: FlowKey) -> FlowNames:
    return {"transfer_id": key.transfer_id, "generation": key.generation}


class _OfFlow(Frame):
    transfer_id: Name
    generation: Generation32

    @property
    def key(self) -> FlowKey:
        return FlowKey(TransferId(self.transfer_id), Generation(self.generation))


# --- client → relay


class Hello(Frame):
    kind: Literal["hello"] = "hello"
    version: int = PROTOCOL_VERSION
    worker: WorkerRef
    bell: Annotated[bytes, Field(max_length=MAX_NAME_BYTES)] = b""
    """Name of the socket at which producers on this node tell the client that a transfer is filled; empty: none."""


class OpenSinkRequest(_OfFlow):
    kind: Literal["open_sink"] = "open_sink"
    total_bytes: Count
    manifest: Name
    deadline_s: Seconds
    wait_s: Annotated[float, Field(ge=0, le=MAX_DURATION_S)]
    retain_s: Annotated[float, Field(ge=0, le=MAX_DURATION_S)] | None = None
    """None is not sent: the release before knows no such field."""


class SealNotice(_OfFlow):
    kind: Literal["seal"] = "seal"


class SinkQuietNotice(_OfFlow):
    kind: Literal["sink_quiet"] = "sink_quiet"


class ReleaseNotice(_OfFlow):
    kind: Literal["release"] = "release"
    consumed: bool
    """All had arrived; otherwise the client gives up."""


class AbortRequest(_OfFlow):
    kind: Literal["abort"] = "abort"
    fault: Fault


class StepNotice(Frame):
    """The client's engine has made a decode step; also now and then while it makes none."""

    kind: Literal["step"] = "step"
    step_s: Seconds
    kv_blocks_free: Count
    kv_block_tokens: Annotated[int, Field(gt=0, lt=2**31)]


class ItlNotice(Frame):
    """How the client's sequences fare: mean time between tokens, and what it should be."""

    kind: Literal["itl"] = "itl"
    itl_s: Interval
    target_s: Interval


class Bye(Frame):
    """The client leaves on purpose: its going is no worker's death."""

    kind: Literal["bye"] = "bye"


_ColdFromClient = (
    Hello | OpenSinkRequest | SealNotice | SinkQuietNotice | ReleaseNotice | AbortRequest | StepNotice | ItlNotice | Bye
)
ClientMessage = _ColdFromClient | FilledNotice | OpenSourceRequest

# --- relay → client


class Welcome(Frame):
    kind: Literal["welcome"] = "welcome"
    relay: RelayRef
    pool_bytes: Count
    slot_bytes: Count


class Refused(Frame):
    """The relay closes this connection next."""

    kind: Literal["refused"] = "refused"
    fault: Fault


class SinkOpenedNotice(_OfFlow):
    kind: Literal["sink_opened"] = "sink_opened"
    slots: Indices
    chunk_bytes: Count


class SinkAttachedNotice(_OfFlow):
    """The consumer is on this node too: when all is filled, its bell may be rung with that token."""

    kind: Literal["sink_attached"] = "sink_attached"
    bell: Annotated[bytes, Field(min_length=1, max_length=MAX_NAME_BYTES)]
    token: Token


class SinkEndedNotice(_OfFlow):
    kind: Literal["sink_ended"] = "sink_ended"
    fault: Fault | None = None


class SourceAttachedNotice(_OfFlow):
    """The producer is on this node too, and still fills these slots. They are the client's until it releases them."""

    kind: Literal["source_attached"] = "source_attached"
    pull: Generation32
    slots: Indices
    chunk_bytes: Count
    token: Token


class SourceFailedNotice(_OfFlow):
    kind: Literal["source_failed"] = "source_failed"
    pull: Generation32
    fault: Fault


_ColdFromRelay = (
    Welcome
    | Refused
    | SinkOpenedNotice
    | SinkAttachedNotice
    | SinkEndedNotice
    | SourceAttachedNotice
    | SourceFailedNotice
)
RelayMessage = _ColdFromRelay | SourceReadyNotice

_FROM_CLIENT: TypeAdapter[_ColdFromClient] = TypeAdapter(Annotated[_ColdFromClient, Field(discriminator="kind")])
_FROM_RELAY: TypeAdapter[_ColdFromRelay] = TypeAdapter(Annotated[_ColdFromRelay, Field(discriminator="kind")])


def encode(message: ClientMessage | RelayMessage) -> bytes:
    return prefixed(message.packed() if isinstance(message, Hot) else pack(message))


def decode_from_client(payload: bytes) -> ClientMessage:
    tag = payload[:1]
    if tag == FILLED:
        return read_filled(payload)
    if tag == OPEN_SOURCE:
        return read_open_source(payload)
    return unpack(payload, _FROM_CLIENT, what="client message")


def decode_from_relay(payload: bytes) -> RelayMessage:
    if payload[:1] == SOURCE_READY:
        return read_source_ready(payload)
    return unpack(payload, _FROM_RELAY, what="relay message")
