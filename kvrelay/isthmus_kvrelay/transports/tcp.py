"""TCP between relays: listening, dialing, and the lanes that come of it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from secrets import token_bytes

from structlog.typing import FilteringBoundLogger

from isthmus_kvrelay.compiled.load import Loading
from isthmus_kvrelay.core.events import (
    CloseLane,
    Dial,
    DialFailed,
    ExpectChunk,
    LaneId,
    RevokeFlow,
    SendChunk,
    SlotQuiet,
)
from isthmus_kvrelay.transports.address import parse_address
from isthmus_kvrelay.transports.handshake import (
    NONCE_BYTES,
    DialerHello,
    Identity,
    LaneKind,
    NotAuthentic,
    dial_in,
    let_in,
    reject,
    welcome,
)
from isthmus_kvrelay.transports.joining import Joining
from isthmus_kvrelay.transports.landing import LandingTable
from isthmus_kvrelay.transports.mailbox import Mailbox
from isthmus_kvrelay.transports.port import ControlEffect, Emit
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_kvrelay.transports.stream import PlainStream, Stream
from isthmus_kvrelay.transports.tcp_lane import TcpLane, as_loss
from isthmus_kvrelay.transports.tcp_streams import Ends, not_sent
from isthmus_kvrelay.transports.tls import Tls, TlsSettings, connect
from isthmus_kvrelay.transports.tuning import tune
from isthmus_kvrelay.wire import incarnation_digest
from isthmus_shared.errors import IsthmusError, NoCapacity, PartyLost, ProtocolViolation, StaleParty
from isthmus_shared.ids import Incarnation

MAX_HANDSHAKES = 64
"""Connections that have not proved themselves yet, and half-joined lanes; one more is closed at once."""
BACKLOG = 128
Adopt = Callable[[DialerHello, socket.socket], None]
ACCEPT_PAUSE_S = 0.1
"""After a failed accept, so that a lack of descriptors does not spin."""


@dataclass(frozen=True, slots=True)
class TcpSettings:
    host: str
    port: int
    advertise: str
    """Host that peers are told; the port is added."""
    streams: int
    checksums: bool = True
    """Off for a measurement of what they cost only; both ends alike."""
    compiled: bool = True
    """Trains are moved by compiled loops once those are there; never under TLS."""
    tls: TlsSettings | None = None
    handshake_timeout_s: float = 5.0
    ping_interval_s: float = 1.0
    ping_timeout_s: float = 5.0


class TcpTransport:
    """See `transports.port.Transport`. Lanes go both ways, whoever dialed."""

    def __init__(
        self,
        settings: TcpSettings,
        *,
        me: Identity,
        pool: SharedPool,
        emit: Emit,
        log: FilteringBoundLogger,
        lane_numbers: Iterator[int] | None = None,
        adopt: Mapping[LaneKind, Adopt | None] | None = None,
    ) -> None:
        """`lane_numbers`: shared with the relay's other transports. `adopt`: which kinds of lane may be dialed at the
        listener, and who takes the connections (None: this transport); by default its own kind only.
        """
        self._settings, self._me, self._pool, self._log = settings, me, pool, log
        self._mail = Mailbox(emit)
        self._tls = None if settings.tls is None else Tls(settings.tls)
        self._landing = LandingTable(pool)
        self.loading = Loading(log, wanted=settings.compiled and settings.tls is None)
        self._lanes: dict[LaneId, TcpLane] = {}
        self._joining: dict[tuple[Incarnation, bytes], Joining] = {}
        self._lane_numbers = count(1) if lane_numbers is None else lane_numbers
        self._adopt: dict[LaneKind, Adopt | None] = {"tcp": None} if adopt is None else dict(adopt)
        self._handshakes = 0
        self._uncredited = 0
        self._listener: socket.socket | None = None
        self._stop = asyncio.Event()
        self._work: asyncio.TaskGroup | None = None
        self._greeting: set[asyncio.Task[None]] = set()
        """Dials and handshakes; cancelled when the transport closes."""
        self._runner: asyncio.Task[None] | None = None
        self._lock = threading.Lock()

    @property
    def uncredited_chunks(self) -> int:
        """Chunks that came without credit (late, stale or forged) and were dropped."""
        return self._uncredited

    # --- life

    async def start(self) -> str:
        self._loop = asyncio.get_running_loop()
        self._mail.start()
        listener = socket.create_server((self._settings.host, self._settings.port), backlog=BACKLOG)
        listener.setblocking(False)
        self._listener = listener
        started = asyncio.Event()
        self._runner = asyncio.create_task(self._run(listener, started), name="relay-tcp")
        await started.wait()
        return f"{self._settings.advertise}:{listener.getsockname()[1]}"

    async def _run(self, listener: socket.socket, started: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as work:
            self._work = work
            accepting = work.create_task(self._accept(listener))
            started.set()
            await self._stop.wait()
            accepting.cancel()
            for task in self._greeting:
                task.cancel()
            listener.close()
            for joining in list(self._joining.values()):
                joining.discard()
            self._joining.clear()
            for lane in list(self._lanes.values()):
                lane.close(PartyLost("the relay is stopping"))
        self._work = None

    async def watch(self) -> None:
        if self._runner is not None:
            await asyncio.shield(self._runner)

    async def close(self) -> None:
        self._stop.set()
        if self._runner is not None:
            await self._runner
            self._mail.flush()
        await asyncio.to_thread(self.loading.wait)

    def _greet(self, work: Coroutine[None, None, None]) -> None:
        assert self._work is not None
        task = self._work.create_task(work)
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    # --- effects

    def dial(self, effect: Dial) -> None:
        if self._stop.is_set():
            self._mail.post(DialFailed(effect.peer, PartyLost("the relay is stopping").to_fault()))
        else:
            self._greet(self._dial(effect))

    def send(self, effect: ControlEffect) -> None:
        lane = self._lanes.get(effect.lane)
        if lane is not None:
            lane.send(effect)

    def send_chunk(self, effect: SendChunk) -> None:
        lane = self._lanes.get(effect.lane)
        if lane is None:
            self._mail.post(not_sent(effect))
        else:
            lane.send_chunk(effect)

    def expect(self, effect: ExpectChunk) -> None:
        lane = self._lanes.get(effect.lane)
        if lane is None or lane.closing:
            self._mail.post(SlotQuiet(effect.into))
        else:
            self._landing.arm(effect)

    def revoke(self, effect: RevokeFlow) -> None:
        for ref in self._landing.revoke(effect.lane, effect.key):
            self._mail.post(SlotQuiet(ref))

    def close_lane(self, effect: CloseLane) -> None:
        self._close_lost(effect.lane, effect.fault.to_error())

    # --- told by the lanes' threads

    def _lost(self, lane: LaneId, error: IsthmusError) -> None:
        self._loop.call_soon_threadsafe(self._close_lost, lane, error)

    def _close_lost(self, lane: LaneId, error: IsthmusError) -> None:
        if lane in self._lanes:
            self._lanes[lane].close(error)

    def _refused(self) -> None:
        with self._lock:
            self._uncredited += 1

    # --- dialing

    async def _dial(self, effect: Dial) -> None:
        error: IsthmusError = PartyLost("the relay is stopping")
        sockets: list[socket.socket] = []
        try:
            async with asyncio.timeout(self._settings.handshake_timeout_s):
                await self._dial_streams(effect, sockets)
            await self._lane_up(effect.peer, sockets[0], sockets[1:], dialed=True)
            return
        except TimeoutError:
            error = PartyLost(f"the relay at {effect.address} did not answer in time")
        except (OSError, UnicodeError, RuntimeError) as cause:  # a host name that IDNA knows not; no thread to be had
            error = PartyLost(f"the relay at {effect.address} cannot be reached", why=str(cause))
        except IsthmusError as cause:
            error = cause
        except asyncio.CancelledError:
            self._dial_failed(effect, error, sockets)
            raise
        self._dial_failed(effect, error, sockets)

    def _dial_failed(self, effect: Dial, error: IsthmusError, sockets: list[socket.socket]) -> None:
        for sock in sockets:
            sock.close()
        self._log.warning("lane.dial_failed", address=effect.address, code=error.code, error=error.text)
        self._mail.post(DialFailed(effect.peer, as_loss(error).to_fault()))

    async def _dial_streams(self, effect: Dial, sockets: list[socket.socket]) -> None:
        host, port = parse_address(effect.address)
        infos = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, proto, _, where = infos[0]
        token, streams = token_bytes(NONCE_BYTES), self._settings.streams
        for stream in range(streams + 1):
            sock = socket.socket(family, kind, proto)
            sockets.append(sock)
            tune(sock, str(where[0]))
            sock.setblocking(False)
            await self._loop.sock_connect(sock, where)
            await dial_in(sock, self._me, wanted=effect.peer, lane=token, streams=streams, stream=stream)

    # --- accepting

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, address = await self._loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or the peer was gone before we looked
                self._log.warning("lane.accept_failed", error=str(error))
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            sock.setblocking(False)
            if self._handshakes + len(self._joining) >= MAX_HANDSHAKES or self._stop.is_set():
                sock.close()
                self._log.warning("lane.refused", peer=str(address), code="no_capacity", error="too many handshakes")
                continue
            self._handshakes += 1
            self._greet(self._handshake(sock, address))

    async def _handshake(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        kept, address = False, str(peer)
        try:
            async with asyncio.timeout(self._settings.handshake_timeout_s):
                tune(sock, peer[0])
                hello = await let_in(sock, self._me)
                refusal = self._refusal(hello)
                if refusal is not None:
                    await reject(sock, refusal)
                    raise refusal
                adopt = self._adopt.get(hello.transport)
                if adopt is not None:
                    await welcome(sock)
                    kept = True
                    adopt(hello, sock)
                    return
                self._keep(hello, sock)
                kept = True
                await welcome(sock)
            await self._join(hello)
        except TimeoutError:
            self._log.warning("lane.refused", peer=address, code="deadline_exceeded", error="handshake took too long")
        except OSError as error:
            self._log.warning("lane.refused", peer=address, code="party_lost", error=str(error))
        except NotAuthentic as error:
            self._log.warning("lane.refused", peer=address, code="not_authentic", error=error.text)
        except IsthmusError as error:
            self._log.warning("lane.refused", peer=address, code=error.code, error=error.text)
        finally:
            self._handshakes -= 1
            if not kept:
                sock.close()

    def _refusal(self, hello: DialerHello) -> IsthmusError | None:
        if self._stop.is_set():
            return PartyLost("the relay is stopping")
        if hello.wanted != self._me.incarnation:
            return StaleParty("the relay at this address is another life than the one that was meant")
        if hello.transport not in self._adopt:
            return NoCapacity(f"this relay has no lanes over {hello.transport}")
        if hello.stream > hello.streams:
            return ProtocolViolation("a data stream beyond those announced")
        joining = self._joining.get((Incarnation(hello.incarnation), hello.lane))
        if joining is not None and (joining.streams != hello.streams or hello.stream in joining.sockets):
            return ProtocolViolation("two connections claim to be one stream of a lane")
        if joining is None and hello.stream != 0:
            return StaleParty("the lane of this stream is gone")
        if joining is None and len(self._joining) >= MAX_HANDSHAKES:
            return NoCapacity("too many lanes are being set up")
        return None

    def _keep(self, hello: DialerHello, sock: socket.socket) -> None:
        name = (Incarnation(hello.incarnation), hello.lane)
        joining = self._joining.get(name)
        if joining is None:
            timer = self._loop.call_later(self._settings.handshake_timeout_s, self._forget, name)
            joining = self._joining[name] = Joining(hello.streams, timer)
        joining.sockets[hello.stream] = sock

    def _forget(self, name: tuple[Incarnation, bytes]) -> None:
        joining = self._joining.pop(name, None)
        if joining is not None:
            joining.discard()
            self._log.warning("lane.refused", peer=name[0], code="deadline_exceeded", error="streams are missing")

    async def _join(self, hello: DialerHello) -> None:
        name = (Incarnation(hello.incarnation), hello.lane)
        joining = self._joining.get(name)
        if joining is None or len(joining.sockets) <= joining.streams:
            return
        del self._joining[name]
        joining.timer.cancel()
        data = [joining.sockets[stream] for stream in range(1, joining.streams + 1)]
        await self._lane_up(name[0], joining.sockets[0], data, dialed=False)

    # --- lanes

    async def _lane_up(
        self, peer: Incarnation, control: socket.socket, data: list[socket.socket], *, dialed: bool
    ) -> None:
        try:
            streams = await self._streams(data, dialed=dialed)
            lane = self._lane(peer, streams)
        except (OSError, IsthmusError):
            control.close()
            raise
        self._lanes[lane.lane] = lane
        self._log.info("lane.up", lane=lane.lane, peer=peer, streams=len(data))
        context = None if self._tls is None else self._tls.context(dialed=dialed)
        await connect(lambda: lane, control, context, dialed=dialed)
        if self._stop.is_set():
            lane.close(PartyLost("the relay is stopping"))

    async def _streams(self, data: list[socket.socket], *, dialed: bool) -> Sequence[Stream]:
        self.loading.start()
        if self._tls is None:
            return [PlainStream(sock, self.loading) for sock in data]
        return await self._tls.secure(data, dialed=dialed, timeout_s=self._settings.handshake_timeout_s)

    def _lane(self, peer: Incarnation, streams: Sequence[Stream]) -> TcpLane:
        ends = Ends(
            LaneId(next(self._lane_numbers)),
            me=incarnation_digest(self._me.incarnation),
            peer=incarnation_digest(peer),
            pool=self._pool,
            landing=self._landing,
            checksums=self._settings.checksums,
            report=self._mail.post_all,
            lost=self._lost,
            refused=self._refused,
        )
        return TcpLane(
            ends,
            peer=peer,
            data=streams,
            ping_interval_s=self._settings.ping_interval_s,
            ping_timeout_s=self._settings.ping_timeout_s,
            report=self._mail.post,
            deliver=self._mail.deliver,
            on_closing=self._lane_closing,
        )

    def _lane_closing(self, lane: TcpLane, error: IsthmusError) -> None:
        self._log.info("lane.closing", lane=lane.lane, code=error.code, error=error.text)
        assert self._work is not None
        self._work.create_task(self._finish(lane))

    async def _finish(self, lane: TcpLane) -> None:
        await lane.finish()
        del self._lanes[lane.lane]
        self._log.info("lane.down", lane=lane.lane)
