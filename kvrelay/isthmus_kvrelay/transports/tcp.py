"""TCP between relays: listening, dialing, and the lanes that come of it."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count
from secrets import token_bytes

from structlog.typing import FilteringBoundLogger

from isthmus_kvrelay.core.events import (
    CloseLane,
    Dial,
    DialFailed,
    Event,
    ExpectChunk,
    LaneId,
    RevokeFlow,
    SendChunk,
    SlotQuiet,
)
from isthmus_kvrelay.transports.handshake import (
    NONCE_BYTES,
    DialerHello,
    Identity,
    NotAuthentic,
    dial_in,
    let_in,
    reject,
    welcome,
)
from isthmus_kvrelay.transports.landing import LandingTable
from isthmus_kvrelay.transports.port import ControlEffect, Emit
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_kvrelay.transports.stream import PlainStream
from isthmus_kvrelay.transports.tcp_lane import TcpLane, as_loss
from isthmus_kvrelay.transports.tcp_streams import Ends, not_sent
from isthmus_kvrelay.wire import incarnation_digest
from isthmus_shared.errors import IsthmusError, NoCapacity, PartyLost, ProtocolViolation, StaleParty
from isthmus_shared.ids import Incarnation

MAX_HANDSHAKES = 64
"""Connections that have not proved themselves yet, and half-joined lanes; one more is closed at once."""
BACKLOG = 128
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|(?:[A-Za-z0-9_-]{1,63}\.){0,9}[A-Za-z0-9_-]{1,63}):([0-9]{1,5})")
"""What a ticket may make this relay dial: host name, IPv4, or IPv6 in brackets, and a port."""
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
    handshake_timeout_s: float = 5.0
    ping_interval_s: float = 1.0
    ping_timeout_s: float = 5.0


@dataclass(slots=True)
class _Joining:
    """An accepted lane some of whose streams are still to come."""

    streams: int
    timer: asyncio.TimerHandle
    sockets: dict[int, socket.socket] = field(default_factory=dict)


class TcpTransport:
    """See `transports.port.Transport`. Lanes go both ways, whoever dialed."""

    def __init__(
        self, settings: TcpSettings, *, me: Identity, pool: SharedPool, emit: Emit, log: FilteringBoundLogger
    ) -> None:
        self._settings, self._me, self._pool, self._emit, self._log = settings, me, pool, emit, log
        self._landing = LandingTable(pool)
        self._lanes: dict[LaneId, TcpLane] = {}
        self._joining: dict[tuple[Incarnation, bytes], _Joining] = {}
        self._lane_numbers = count(1)
        self._handshakes = 0
        self._uncredited = 0
        self._listener: socket.socket | None = None
        self._stop = asyncio.Event()
        self._work: asyncio.TaskGroup | None = None
        self._greeting: set[asyncio.Task[None]] = set()
        """Dials and handshakes; cancelled when the transport closes."""
        self._runner: asyncio.Task[None] | None = None
        self._events: deque[Event] = deque()
        self._lock = threading.Lock()
        self._flush_due = False

    @property
    def uncredited_chunks(self) -> int:
        """Chunks that came without credit (late, stale or forged) and were dropped."""
        return self._uncredited

    # --- life

    async def start(self) -> str:
        self._loop = asyncio.get_running_loop()
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
                _discard(joining)
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
            self._flush()

    def _greet(self, work: Coroutine[None, None, None]) -> None:
        assert self._work is not None
        task = self._work.create_task(work)
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    # --- effects

    def dial(self, effect: Dial) -> None:
        if self._stop.is_set():
            self.post(DialFailed(effect.peer, PartyLost("the relay is stopping").to_fault()))
        else:
            self._greet(self._dial(effect))

    def send(self, effect: ControlEffect) -> None:
        lane = self._lanes.get(effect.lane)
        if lane is not None:
            lane.send(effect)

    def send_chunk(self, effect: SendChunk) -> None:
        lane = self._lanes.get(effect.lane)
        if lane is None:
            self.post(not_sent(effect))
        else:
            lane.send_chunk(effect)

    def expect(self, effect: ExpectChunk) -> None:
        lane = self._lanes.get(effect.lane)
        if lane is None or lane.closing:
            self.post(SlotQuiet(effect.into))
        else:
            self._landing.arm(effect)

    def revoke(self, effect: RevokeFlow) -> None:
        for ref in self._landing.revoke(effect.lane, effect.key):
            self.post(SlotQuiet(ref))

    def close_lane(self, effect: CloseLane) -> None:
        lane = self._lanes.get(effect.lane)
        if lane is not None:
            lane.close(effect.fault.to_error())

    # --- events, from any thread, to the loop in order

    def post(self, event: Event) -> None:
        self._post_all((event,))

    def _post_all(self, events: Sequence[Event]) -> None:
        with self._lock:
            self._events.extend(events)
            if self._flush_due:
                return
            self._flush_due = True
        self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        while True:
            with self._lock:
                if not self._events:
                    self._flush_due = False
                    return
                events, self._events = self._events, deque()
            self._emit(*events)

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
            await self._lane_up(effect.peer, sockets[0], sockets[1:])
            return
        except TimeoutError:
            error = PartyLost(f"the relay at {effect.address} did not answer in time")
        except (OSError, UnicodeError) as cause:  # the latter from a host name that IDNA knows not
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
        self.post(DialFailed(effect.peer, as_loss(error).to_fault()))

    async def _dial_streams(self, effect: Dial, sockets: list[socket.socket]) -> None:
        host, port = _address(effect.address)
        infos = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, proto, _, where = infos[0]
        token, streams = token_bytes(NONCE_BYTES), self._settings.streams
        for stream in range(streams + 1):
            sock = socket.socket(family, kind, proto)
            sockets.append(sock)
            _tune(sock)
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
            self._greet(self._handshake(sock, str(address)))

    async def _handshake(self, sock: socket.socket, address: str) -> None:
        kept = False
        try:
            async with asyncio.timeout(self._settings.handshake_timeout_s):
                _tune(sock)
                hello = await let_in(sock, self._me)
                refusal = self._refusal(hello)
                if refusal is not None:
                    await reject(sock, refusal)
                    raise refusal
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
            joining = self._joining[name] = _Joining(hello.streams, timer)
        joining.sockets[hello.stream] = sock

    def _forget(self, name: tuple[Incarnation, bytes]) -> None:
        joining = self._joining.pop(name, None)
        if joining is not None:
            _discard(joining)
            self._log.warning("lane.refused", peer=name[0], code="deadline_exceeded", error="streams are missing")

    async def _join(self, hello: DialerHello) -> None:
        name = (Incarnation(hello.incarnation), hello.lane)
        joining = self._joining.get(name)
        if joining is None or len(joining.sockets) <= joining.streams:
            return
        del self._joining[name]
        joining.timer.cancel()
        data = [joining.sockets[stream] for stream in range(1, joining.streams + 1)]
        await self._lane_up(name[0], joining.sockets[0], data)

    # --- lanes

    async def _lane_up(self, peer: Incarnation, control: socket.socket, data: list[socket.socket]) -> None:
        number = LaneId(next(self._lane_numbers))
        ends = Ends(
            number,
            me=incarnation_digest(self._me.incarnation),
            peer=incarnation_digest(peer),
            pool=self._pool,
            landing=self._landing,
            checksums=self._settings.checksums,
            report=self._post_all,
            lost=self._lost,
            refused=self._refused,
        )
        lane = TcpLane(
            ends,
            peer=peer,
            data=[PlainStream(sock) for sock in data],
            ping_interval_s=self._settings.ping_interval_s,
            ping_timeout_s=self._settings.ping_timeout_s,
            report=self.post,
            on_closing=self._lane_closing,
        )
        self._lanes[number] = lane
        self._log.info("lane.up", lane=number, peer=peer, streams=len(data))
        await self._loop.create_connection(lambda: lane, sock=control)
        if self._stop.is_set():
            lane.close(PartyLost("the relay is stopping"))

    def _lane_closing(self, lane: TcpLane, error: IsthmusError) -> None:
        self._log.info("lane.closing", lane=lane.lane, code=error.code, error=error.text)
        assert self._work is not None
        self._work.create_task(self._finish(lane))

    async def _finish(self, lane: TcpLane) -> None:
        await lane.finish()
        del self._lanes[lane.lane]
        self._log.info("lane.down", lane=lane.lane)


def _address(text: str) -> tuple[str, int]:
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found[2]) > 65_535:
        raise ProtocolViolation(f"{text[:100]!r} is no relay's address")
    return found[1].strip("[]"), int(found[2])


def _tune(sock: socket.socket) -> None:
    """Buffer sizes are the kernel's to choose: it grows them with the path, while a size that is set stays (ADR 4)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _discard(joining: _Joining) -> None:
    joining.timer.cancel()
    for sock in joining.sockets.values():
        sock.close()
