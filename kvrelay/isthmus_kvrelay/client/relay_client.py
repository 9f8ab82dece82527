"""One worker's connection to its node's relay."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from pydantic import ValidationError

from isthmus_kvrelay import control
from isthmus_kvrelay.client.bell import Bell
from isthmus_kvrelay.client.outbox import Outbox
from isthmus_kvrelay.client.sink import RelaySink
from isthmus_kvrelay.client.source import RelaySource
from isthmus_kvrelay.client.taking import take_pool
from isthmus_kvrelay.core.events import FlowKey
from isthmus_kvrelay.framing import FrameReader, cut
from isthmus_kvrelay.hot import MAX_DURATION_S
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_shared.engines.kv_port import KvSink, KvSource
from isthmus_shared.errors import (
    Cancelled,
    DeadlineExceeded,
    Fault,
    InvalidRequest,
    IsthmusError,
    PartyLost,
    ProtocolViolation,
    StagingFull,
)
from isthmus_shared.ids import Generation, TransferId
from isthmus_shared.kv.manifest import KvManifest
from isthmus_shared.messages.work import KvTicket, RelayRef, WorkerRef

WAIT_GRACE_S = 2.0
"""The relay answers `open_sink` within its wait; if its word has not come this much later, the client gives up."""

LEAVE_S = 1.0
"""For what is unsent to reach the relay at the end; it takes microseconds unless the relay hangs."""


@dataclass(frozen=True, slots=True)
class _Opening:
    """A sink that was asked for."""

    total_bytes: int
    sink: asyncio.Future[RelaySink]


class RelayClient:
    """Made by `connect`. All methods are for the loop that connected; sinks and sources for engine threads too."""

    def __init__(self, make_bell: Callable[[Callable[[bytes], None]], Bell] = Bell) -> None:
        self.lost = asyncio.Event()
        """Set when the relay is gone; every open sink and source has then failed."""
        self._loop = asyncio.get_running_loop()
        self._link = _Link(self)
        self._welcome: asyncio.Future[control.Welcome] = self._loop.create_future()
        self._pool: SharedPool | None = None
        self._relay: RelayRef | None = None
        self._opening: dict[FlowKey, _Opening] = {}
        self._sinks: dict[FlowKey, RelaySink] = {}
        self._sources: dict[FlowKey, RelaySource] = {}
        self._rings: dict[bytes, RelaySource] = {}
        """By token: sources whose producer may ring."""
        self._bell = make_bell(self._rung)
        self._outbox = Outbox(self._loop, self._write)

    @classmethod
    async def connect(cls, socket_path: str, *, worker: WorkerRef, timeout_s: float) -> RelayClient:
        """Raises `PartyLost` when no relay is there, `DeadlineExceeded` when it does not answer, or its refusal."""
        sock, fd = await take_pool(socket_path, timeout_s)
        client = cls()
        connected = False
        try:
            async with asyncio.timeout(timeout_s):
                await client._loop.create_unix_connection(lambda: client._link, sock=sock)
                client._link.write([control.Hello(worker=worker, bell=client._bell.name)])
                welcome = await client._welcome
            client._pool = SharedPool.attach(fd, pool_bytes=welcome.pool_bytes, slot_bytes=welcome.slot_bytes)
            connected = True
        except TimeoutError as error:
            raise DeadlineExceeded(f"the relay at {socket_path} did not answer within {timeout_s} s") from error
        finally:
            if not connected:
                client._bell.close()
                client._link.abort()
                sock.close()
                os.close(fd)
        client._relay = welcome.relay
        return client

    @property
    def relay(self) -> RelayRef:
        assert self._relay is not None
        return self._relay

    # --- transfers

    async def open_sink(
        self,
        transfer_id: TransferId,
        generation: Generation,
        manifest: KvManifest,
        *,
        deadline_s: float,
        wait_s: float,
        retain_s: float = 0.0,
    ) -> KvSink:
        """Staging for a whole transfer, all at once.

        Raises `StagingFull` after `wait_s`, `InvalidRequest` if it can never fit, `StaleParty` for an old generation,
        `Draining`, `NoCapacity`, `PartyLost`. From `deadline_s` on the relay frees it, taken or not; once
        taken, it may keep it for another taker until `retain_s`.
        """
        key = FlowKey(transfer_id, generation)
        self._check_connected()
        if key in self._opening or key in self._sinks:
            raise InvalidRequest(f"{transfer_id} generation {generation} has a sink already", param="generation")
        with _naming_bad_fields():
            request = control.OpenSinkRequest(
                transfer_id=transfer_id,
                generation=generation,
                total_bytes=manifest.total_bytes,
                manifest=_digest(manifest),
                deadline_s=deadline_s,
                wait_s=wait_s,
                retain_s=min(retain_s, MAX_DURATION_S) or None,
            )
        opening = _Opening(manifest.total_bytes, self._loop.create_future())
        self._opening[key] = opening
        self._outbox.post(request)
        try:
            async with asyncio.timeout(wait_s + WAIT_GRACE_S):
                return await opening.sink
        except TimeoutError:
            error = StagingFull(f"the relay gave no staging within {wait_s} s")
            self._forget_sink(key, error.to_fault())
            raise error from None
        except asyncio.CancelledError:
            self._forget_sink(key, Cancelled("the producer no longer wants the sink").to_fault())
            raise
        finally:
            self._opening.pop(key, None)

    def _forget_sink(self, key: FlowKey, fault: Fault) -> None:
        self._outbox.post(control.AbortRequest(**control.names_of(key), fault=fault))
        self._outbox.post(control.SinkQuietNotice(**control.names_of(key)))

    async def open_source(self, ticket: KvTicket, *, deadline_s: float) -> KvSource:
        """Asks for a transfer and returns at once; `ready()` of what it returns waits and raises. Release it always.

        `ticket.pull` names the attempt: with a higher one than another destination used, this one takes over.
        """
        key = FlowKey(ticket.transfer_id, ticket.generation)
        pool = self._check_connected()
        if key in self._sources:
            text = f"{ticket.transfer_id} generation {ticket.generation} has a source already"
            raise InvalidRequest(text, param="ticket.generation")
        total = ticket.manifest.total_bytes
        request = control.OpenSourceRequest(
            *key,
            ticket.source.incarnation,
            ticket.source.address,
            total,
            _digest(ticket.manifest),
            deadline_s,
            ticket.pull,
            ticket.manifest.prompt_tokens,
        )
        problem = request.problem()
        if problem is not None:
            raise InvalidRequest(f"{problem[0]}: {problem[1]}", param=problem[0])
        source = RelaySource(
            key, pull=ticket.pull, total_bytes=total, deadline_s=deadline_s, pool=pool, post=self._outbox.post
        )
        self._sources[key] = source
        self._outbox.post(request)
        self._outbox.flush()
        return source

    async def abort(self, transfer_id: TransferId, generation: Generation, fault: Fault) -> None:
        """End a transfer from this side, sealed or not: staged KV is freed, the peer is told. Unknown: nothing."""
        with _naming_bad_fields():
            request = control.AbortRequest(transfer_id=transfer_id, generation=generation, fault=cut(fault))
        self._outbox.post(request)

    # --- how the engine fares

    def report_step(self, *, step_s: float, kv_blocks_free: int, kv_block_tokens: int) -> None:
        """After each decode step, and at times in between: the relay grants senders what the engine can bear.

        Thread-safe. A later report replaces one that has not left yet.
        """
        with _naming_bad_fields():
            message = control.StepNotice(step_s=step_s, kv_blocks_free=kv_blocks_free, kv_block_tokens=kv_block_tokens)
        self._outbox.post(message)

    def report_itl(self, itl_ms: float, target_ms: float) -> None:
        """Measured inter-token latency against what it should be: those who send here slow down above the target.

        Thread-safe.
        """
        with _naming_bad_fields():
            message = control.ItlNotice(itl_s=itl_ms / 1e3, target_s=target_ms / 1e3)
        self._outbox.post(message)

    async def close(self) -> None:
        """Leave the relay, which gives back all that this client has not sealed. Idempotent.

        A relay that reads nothing any more is left without a goodbye after `LEAVE_S`.
        """
        self._outbox.flush()
        self._link.leave()
        try:
            async with asyncio.timeout(LEAVE_S):
                await self.lost.wait()
        except TimeoutError:
            self._link.abort()
            await self.lost.wait()  # the loop says so in its next turn
        if self._pool is not None:
            self._pool.close()

    def _check_connected(self) -> SharedPool:
        if self.lost.is_set() or self._pool is None:
            raise PartyLost("this node's relay is gone", todo="serve aggregated until it is back")
        return self._pool

    # --- out

    def _write(self, messages: Sequence[control.ClientMessage]) -> None:
        for message in messages:
            self._note(message)
        self._link.write(messages)

    def _note(self, message: control.ClientMessage) -> None:
        """The client's own ends of a transfer: what the relay says of it after that is nobody's news."""
        match message:
            case control.SealNotice() | control.SinkQuietNotice():
                self._sinks.pop(message.key, None)
            case control.ReleaseNotice():
                source = self._sources.pop(message.key, None)
                if source is not None and source.token is not None:
                    self._rings.pop(source.token, None)

    # --- in

    def take(self, message: control.RelayMessage) -> None:
        match message:
            case control.Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(message)
            case control.Refused():
                self.gone(message.fault.to_error())
            case control.SinkOpenedNotice():
                self._sink_opened(message)
            case control.SinkEndedNotice():
                self._sink_ended(message)
            case control.SinkAttachedNotice():
                sink = self._sinks.get(message.key)
                if sink is not None:
                    sink.attached(functools.partial(self._bell.ring, message.bell, message.token))
            case control.SourceAttachedNotice() | control.SourceReadyNotice() | control.SourceFailedNotice():
                source = self._sources.get(message.key)
                if source is not None and source.pull == message.pull:
                    self._of_source(source, message)

    def _of_source(
        self,
        source: RelaySource,
        message: control.SourceAttachedNotice | control.SourceReadyNotice | control.SourceFailedNotice,
    ) -> None:
        match message:
            case control.SourceAttachedNotice():
                source.attached(control.unpack_indices(message.slots), message.chunk_bytes)
                self._rings.pop(source.token or b"", None)
                source.token = message.token
                self._rings[message.token] = source
            case control.SourceReadyNotice():
                source.arrived(control.unpack_indices(message.slots), message.chunk_bytes)
            case control.SourceFailedNotice():
                source.fail(message.fault)

    def _rung(self, token: bytes) -> None:
        source = self._rings.pop(token, None)
        if source is not None:
            source.rung()

    def _sink_opened(self, message: control.SinkOpenedNotice) -> None:
        opening = self._opening.pop(message.key, None)
        if opening is None or self._pool is None:
            return  # given up meanwhile; the abort is on its way
        slots = control.unpack_indices(message.slots)
        sink = RelaySink(
            message.key,
            total_bytes=opening.total_bytes,
            slots=slots,
            chunk_bytes=message.chunk_bytes,
            pool=self._pool,
            post=self._outbox.post,
        )
        self._sinks[message.key] = sink
        if not opening.sink.done():
            opening.sink.set_result(sink)

    def _sink_ended(self, message: control.SinkEndedNotice) -> None:
        opening, sink = self._opening.get(message.key), self._sinks.get(message.key)
        if sink is not None:
            sink.end(message.fault)
        elif opening is not None and message.fault is not None and not opening.sink.done():
            opening.sink.set_exception(message.fault.to_error())

    def gone(self, error: IsthmusError) -> None:
        """The connection is over: everything open fails. Idempotent."""
        if not self._welcome.done():
            self._welcome.set_exception(error)
        for opening in self._opening.values():
            if not opening.sink.done():
                opening.sink.set_exception(error)
        for sink in list(self._sinks.values()):
            sink.end(error.to_fault())
        for source in list(self._sources.values()):
            source.fail(error.to_fault())
        self._sinks.clear()
        self._sources.clear()
        self._rings.clear()
        self._bell.close()


class _Link(asyncio.Protocol):
    """The connection itself."""

    def __init__(self, client: RelayClient) -> None:
        self._client = client
        self._reader = FrameReader(limit=control.MAX_RELAY_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._leaving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by isinstance

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                self._client.take(control.decode_from_relay(payload))
        except ProtocolViolation as error:
            self._client.gone(error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        why = str(exc) if exc else "it closed the connection"
        error = PartyLost("the client was closed") if self._leaving else PartyLost("the node's relay is gone", why=why)
        self._client.gone(error)
        self._client.lost.set()

    def write(self, messages: Iterable[control.ClientMessage]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(control.encode(message) for message in messages))

    def leave(self) -> None:
        self._leaving = True
        self.write([control.Bye()])
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@contextlib.contextmanager
def _naming_bad_fields() -> Iterator[None]:
    """An id or a duration beyond what the protocol carries is the caller's fault."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{field}: {first['msg']}", param=field) from error


def _digest(manifest: KvManifest) -> str:
    return hashlib.blake2b(manifest.model_dump_json().encode(), digest_size=16).hexdigest()
