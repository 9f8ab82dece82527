"""One client's connection: its frames become the core's events, the core's effects become its frames."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Protocol, cast

from isthmus_kvrelay import control
from isthmus_kvrelay.core.events import (
    AbortByClient,
    Attached,
    ChunksFilled,
    ClientId,
    Event,
    FlowKey,
    ItlReported,
    OpenSink,
    OpenSource,
    ReleaseSource,
    SealSink,
    SinkEnded,
    SinkOpened,
    SinkQuiet,
    SourceFailed,
    SourceReady,
    StepReported,
)
from isthmus_kvrelay.daemon.sockets import peer_uid
from isthmus_kvrelay.framing import FrameReader, cut
from isthmus_shared.errors import InvalidRequest, IsthmusError, PartyLost, ProtocolViolation
from isthmus_shared.messages.work import WorkerRef

HELLO_TIMEOUT_S = 5.0
CLOSE_GRACE_S = 1.0
MAX_UNSENT_BYTES = 32 << 20
"""A client that lets this much pile up is not reading; it is closed. Two of the largest frames."""

ClientEffect = SinkOpened | SinkEnded | SourceReady | SourceFailed


class Host(Protocol):
    """What a session needs of its daemon."""

    @property
    def pool_fd(self) -> int: ...

    @property
    def welcome(self) -> control.Welcome: ...

    def joined(self, session: Session) -> None: ...

    def left(self, session: Session, why: str) -> None: ...

    def take(self, *events: Event) -> None: ...


class Session(asyncio.Protocol):
    def __init__(self, client: ClientId, host: Host) -> None:
        self.client = client
        self.worker: WorkerRef | None = None
        self.bell = b""
        self.said_bye = False
        self._host = host
        self._reader = FrameReader(limit=control.MAX_CLIENT_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._hello_timer: asyncio.TimerHandle | None = None
        self._closed_because: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by isinstance
        if not self._give_pool(transport):
            return
        loop = asyncio.get_running_loop()
        late = ProtocolViolation(f"no hello within {HELLO_TIMEOUT_S} s")
        self._hello_timer = loop.call_later(HELLO_TIMEOUT_S, self.close, late)

    def _give_pool(self, transport: asyncio.BaseTransport) -> bool:
        """False if the connection was closed instead."""
        # A socket object of our own on a copy of the descriptor: the loop's (uvloop's above all) passes no descriptors.
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as sock:
            if peer_uid(sock) not in (os.geteuid(), 0):
                self.close(InvalidRequest("only the relay's own user and root may be its clients"))
                return False
            try:
                socket.send_fds(sock, [control.FD_BYTE], [self._host.pool_fd])
            except OSError as error:
                self.close(PartyLost("the client did not take the pool", why=str(error)))
                return False
        return True

    def data_received(self, data: bytes) -> None:
        events: list[Event] = []
        try:
            for payload in self._reader.feed(data):
                if self._closed_because is not None:
                    break
                event = self._event(control.decode_from_client(payload))
                if event is not None:
                    events.append(event)
        except ProtocolViolation as error:
            self._hand_over(events)
            self.close(error)
        else:
            self._hand_over(events)

    def _hand_over(self, events: list[Event]) -> None:
        if events:
            self._host.take(*events)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        why = self._closed_because or (str(exc) if exc else "its connection closed")
        self._host.left(self, why)

    def close(self, error: IsthmusError) -> None:
        """Tell the client why, and close."""
        if self._closed_because is None and self._transport is not None:
            self._closed_because = error.text
            self._transport.write(control.encode(control.Refused(fault=cut(error.to_fault()))))
            self._transport.close()
            # A client that does not read its refusal must not keep what it holds.
            asyncio.get_running_loop().call_later(CLOSE_GRACE_S, self._transport.abort)

    def abort(self) -> None:
        """Close at once, whatever the client has not read yet."""
        if self._transport is not None:
            self._transport.abort()

    def _event(self, message: control.ClientMessage) -> Event | None:
        """What the core is told of it; None for what is the session's own."""
        if isinstance(message, control.Hello):
            self._greet(message)
            return None
        if self.worker is None:
            raise ProtocolViolation("a client must say hello first")
        if isinstance(message, control.Bye):
            self.said_bye = True
            return None
        return event_from_client(self.client, message)

    def _greet(self, hello: control.Hello) -> None:
        if self.worker is not None:
            raise ProtocolViolation("a second hello")
        if hello.version != control.PROTOCOL_VERSION:
            text = f"the client speaks version {hello.version}, this relay {control.PROTOCOL_VERSION}"
            raise ProtocolViolation(text, todo="run one release of Isthmus on this node")
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self.worker, self.bell = hello.worker, hello.bell
        self._write(self._host.welcome)
        self._host.joined(self)

    def send(self, effect: ClientEffect) -> None:
        names = {"transfer_id": effect.key.transfer_id, "generation": effect.key.generation}
        match effect:
            case SinkOpened():
                facts = {"slots": control.pack_indices(effect.slots), "chunk_bytes": effect.chunk_bytes}
                self._write(control.SinkOpenedNotice.model_validate(names | facts))
            case SourceReady():
                slots = control.pack_indices(effect.slots)
                self._write(control.SourceReadyNotice(*effect.key, effect.pull, slots, effect.chunk_bytes))
            case SinkEnded():
                fault = cut(effect.fault) if effect.fault is not None else None
                self._write(control.SinkEndedNotice.model_validate(names | {"fault": fault}))
            case SourceFailed():
                facts = {"pull": effect.pull, "fault": cut(effect.fault)}
                self._write(control.SourceFailedNotice.model_validate(names | facts))

    def attach_source(self, effect: Attached, token: bytes) -> None:
        """This client is the consumer of a flow whose producer is here too."""
        names = {"transfer_id": effect.key.transfer_id, "generation": effect.key.generation, "pull": effect.pull}
        facts = {"slots": control.pack_indices(effect.slots), "chunk_bytes": effect.chunk_bytes, "token": token}
        self._write(control.SourceAttachedNotice.model_validate(names | facts))

    def attach_sink(self, key: FlowKey, bell: bytes, token: bytes) -> None:
        """This client is the producer of a flow whose consumer is here too."""
        self._write(control.SinkAttachedNotice(**control.names_of(key), bell=bell, token=token))

    def _write(self, message: control.RelayMessage) -> None:
        if self._closed_because is not None or self._transport is None:
            return
        self._transport.write(control.encode(message))
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._closed_because = "it does not read what it is sent"
            self._transport.abort()


def event_from_client(client: ClientId, message: control.ClientMessage) -> Event:
    """Raises `ProtocolViolation` for what a client does not send, or not now."""
    match message:
        case control.OpenSinkRequest():
            sizes = message.total_bytes, message.manifest
            return OpenSink(client, message.key, *sizes, message.deadline_s, message.wait_s, message.retain_s or 0.0)
        case control.FilledNotice():
            return ChunksFilled(client, message.key, control.unpack_indices(message.chunks))
        case control.SealNotice():
            return SealSink(client, message.key)
        case control.SinkQuietNotice():
            return SinkQuiet(client, message.key)
        case control.OpenSourceRequest():
            return _open_source(client, message)
        case control.ReleaseNotice():
            return ReleaseSource(client, message.key, message.consumed)
        case control.StepNotice():
            return StepReported(client, message.step_s, message.kv_blocks_free, message.kv_block_tokens)
        case control.ItlNotice():
            return ItlReported(client, message.itl_s, message.target_s)
        case control.AbortRequest():
            return AbortByClient(client, message.key, message.fault)
        case _:
            raise ProtocolViolation(f"a client does not send {message.kind!r}")


def _open_source(client: ClientId, message: control.OpenSourceRequest) -> OpenSource:
    return OpenSource(
        client,
        message.key,
        message.peer,
        message.address,
        message.total_bytes,
        message.manifest,
        message.deadline_s,
        pull=message.pull,
        kv_tokens=message.kv_tokens,
    )
