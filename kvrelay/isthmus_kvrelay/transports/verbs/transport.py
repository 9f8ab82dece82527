"""Lanes over RDMA verbs: dialing, accepting what the relay's listener hands over, and the adapters they share."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from secrets import token_bytes

from structlog.typing import FilteringBoundLogger

from isthmus_kvrelay.core.events import (
    ChunkSent,
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
from isthmus_kvrelay.transports.address import parse_address
from isthmus_kvrelay.transports.handshake import NONCE_BYTES, DialerHello, Identity, dial_in
from isthmus_kvrelay.transports.port import ControlEffect, Emit
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_kvrelay.transports.tcp_lane import as_loss
from isthmus_kvrelay.transports.verbs.binding import Binding, Depths, PathSettings
from isthmus_kvrelay.transports.verbs.control_stream import Liveness
from isthmus_kvrelay.transports.verbs.health import FIRST_QUARANTINE_S, LONGEST_QUARANTINE_S, RailHealth
from isthmus_kvrelay.transports.verbs.landings import Landings
from isthmus_kvrelay.transports.verbs.lane import LaneParts, VerbsLane
from isthmus_kvrelay.transports.verbs.memory import Adapter, PoolMemory, open_adapter
from isthmus_kvrelay.transports.verbs.messages import MAX_RAILS
from isthmus_kvrelay.transports.verbs.rails import RailMaker
from isthmus_shared.errors import IsthmusError, PartyLost
from isthmus_shared.ids import Incarnation

DEPTHS = Depths(send=130, receive=64)
"""Of a queue pair: 64 chunks each way (64 MiB at the default slot size: 400 Gb/s over 1.3 ms), and two writes to spare.
Adapters grant at least 128 of each; most grant thousands."""


@dataclass(frozen=True, slots=True)
class VerbsSettings:
    devices: tuple[str, ...] = ()
    """One rail each, in the same order at every relay: rail i joins the i-th device here with the i-th there."""
    gid_index: int | None = None
    """None: the best that the device has, see `gids.rank_gids`."""
    depths: Depths = DEPTHS
    path: PathSettings = field(default_factory=PathSettings)
    setup_timeout_s: float = 5.0
    liveness: Liveness = field(default_factory=Liveness)
    first_quarantine_s: float = FIRST_QUARANTINE_S
    longest_quarantine_s: float = LONGEST_QUARANTINE_S


class VerbsTransport:
    """See `transports.port.Transport`. It does not listen: `adopt` is given authenticated connections."""

    def __init__(
        self,
        settings: VerbsSettings,
        binding: Binding,
        *,
        me: Identity,
        pool: SharedPool,
        emit: Emit,
        log: FilteringBoundLogger,
        lane_numbers: Iterator[int],
        dial_failed: Callable[[Dial, IsthmusError], None] | None = None,
    ) -> None:
        """`lane_numbers`: shared with the relay's other transports. `dial_failed`: told instead of the core."""
        assert 0 < len(settings.devices) <= MAX_RAILS
        self._settings, self._binding, self._me, self._emit, self._log = settings, binding, me, emit, log
        self._lane_numbers = lane_numbers
        self._dial_failed = dial_failed or self._tell_dial_failed
        self._memory = PoolMemory(pool)
        self._landings = Landings(pool, self._memory.incoming)
        self._lanes: dict[LaneId, VerbsLane] = {}
        self._adapters: tuple[Adapter, ...] = ()
        self._maker: RailMaker | None = None
        self._events: deque[Event] = deque()
        self._flush_due = False
        self._uncredited = 0
        self._stop = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._work: asyncio.TaskGroup | None = None
        self._setups: set[asyncio.Task[None]] = set()

    @property
    def uncredited_chunks(self) -> int:
        """Chunks that came without credit (late, stale or forged) and were dropped."""
        return self._uncredited

    @property
    def rail_failures(self) -> dict[str, int]:
        """Since the start, by cause: `retry_exc_err`, `rnr_retry_exc_err`, `rem_access_err`, … or `refused`."""
        return dict(self._maker.failures) if self._maker is not None else {}

    # --- life

    async def start(self) -> None:
        """Open the devices and register the pool with each; `ConfigInvalid` says which cannot be used and why."""
        self._loop = asyncio.get_running_loop()
        opened: list[Adapter] = []
        try:
            for name in self._settings.devices:
                opened.append(
                    await asyncio.to_thread(
                        open_adapter, self._binding, name, self._memory, gid_index=self._settings.gid_index
                    )
                )
        except BaseException:
            for adapter in opened:
                adapter.close()
            self._memory.close()
            raise
        self._adapters = tuple(opened)
        health = RailHealth(first_s=self._settings.first_quarantine_s, longest_s=self._settings.longest_quarantine_s)
        self._maker = RailMaker(self._adapters, self._memory, health, self._settings.depths, self._settings.path)
        started = asyncio.Event()
        self._runner = asyncio.create_task(self._run(started), name="relay-verbs")
        await started.wait()
        for adapter in opened:
            mtu = adapter.port.mtu_bytes
            self._log.info("adapter.ready", device=adapter.name, gid=adapter.gid.text, mtu_bytes=mtu)

    async def _run(self, started: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as work:
            self._work = work
            started.set()
            await self._stop.wait()
            for task in self._setups:
                task.cancel()
            for lane in list(self._lanes.values()):
                lane.close(PartyLost("the relay is stopping"))
        self._work = None

    async def watch(self) -> None:
        if self._runner is not None:
            await asyncio.shield(self._runner)

    async def close(self) -> None:
        self._stop.set()
        if self._runner is None:
            return
        await self._runner
        self._flush()
        if self._maker is not None:
            await asyncio.gather(*self._maker.joining, return_exceptions=True)
        for adapter in self._adapters:
            adapter.close()
        if self._adapters:
            self._memory.close()
        self._adapters = ()

    # --- effects

    def dial(self, effect: Dial) -> None:
        if self._stop.is_set() or self._work is None:
            self._tell_dial_failed(effect, PartyLost("the relay is stopping"))
            return
        task = self._work.create_task(self._dial(effect))
        self._setups.add(task)
        task.add_done_callback(self._setups.discard)

    def send(self, effect: ControlEffect) -> None:
        lane = self._lanes.get(effect.lane)
        if lane is not None:
            lane.send(effect)

    def send_chunk(self, effect: SendChunk) -> None:
        lane = self._lanes.get(effect.lane)
        if lane is None:
            self.post(ChunkSent(effect.lane, effect.key, effect.chunk, effect.out_of, ok=False))
        else:
            lane.send_chunk(effect)

    def expect(self, effect: ExpectChunk) -> None:
        lane = self._lanes.get(effect.lane)
        if lane is None:
            self.post(SlotQuiet(effect.into))
        else:
            lane.expect(effect)

    def revoke(self, effect: RevokeFlow) -> None:
        lane = self._lanes.get(effect.lane)
        if lane is not None:
            lane.revoke(effect)

    def close_lane(self, effect: CloseLane) -> None:
        lane = self._lanes.get(effect.lane)
        if lane is not None:
            lane.close(effect.fault.to_error())

    # --- events: never from within a call

    def post(self, event: Event) -> None:
        self._events.append(event)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        while self._events:
            self._emit(self._events.popleft())

    def _refused(self) -> None:
        self._uncredited += 1

    # --- lanes

    async def _dial(self, effect: Dial) -> None:
        error: IsthmusError
        try:
            async with asyncio.timeout(self._settings.setup_timeout_s):
                await self._dial_lane(effect)
            return
        except TimeoutError:
            error = PartyLost(f"the relay at {effect.address} did not answer in time")
        except (OSError, UnicodeError) as cause:  # the latter from a host name that IDNA knows not
            error = PartyLost(f"the relay at {effect.address} cannot be reached", why=str(cause))
        except IsthmusError as cause:
            error = cause
        except asyncio.CancelledError:
            self._tell_dial_failed(effect, PartyLost("the relay is stopping"))
            raise
        self._log.warning("lane.dial_failed", address=effect.address, code=error.code, error=error.text)
        self._dial_failed(effect, error)

    def _tell_dial_failed(self, effect: Dial, error: IsthmusError) -> None:
        self.post(DialFailed(effect.peer, as_loss(error).to_fault()))

    async def _dial_lane(self, effect: Dial) -> None:
        host, port = parse_address(effect.address)
        family, kind, proto, _, where = (await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setblocking(False)
            await self._loop.sock_connect(sock, where)
            token = token_bytes(NONCE_BYTES)
            await dial_in(sock, self._me, wanted=effect.peer, lane=token, streams=1, stream=0, transport="verbs")
            lane = self._lane(effect.peer, dialed=True)
        except BaseException:
            sock.close()
            raise
        await self._go(lane, sock)

    def adopt(self, hello: DialerHello, sock: socket.socket) -> None:
        """A dialer that wants a verbs lane has proved itself and was welcomed; the connection is this lane's now."""
        if self._stop.is_set() or self._work is None:
            sock.close()
            return
        task = self._work.create_task(self._accept(Incarnation(hello.incarnation), sock))
        self._setups.add(task)
        task.add_done_callback(self._setups.discard)

    async def _accept(self, peer: Incarnation, sock: socket.socket) -> None:
        lane = self._lane(peer, dialed=False)
        try:
            async with asyncio.timeout(self._settings.setup_timeout_s):
                await self._go(lane, sock)
        except TimeoutError:
            lane.close(PartyLost("the peer did not bring a rail up in time"))
        except (IsthmusError, OSError) as error:
            self._log.warning("lane.refused", lane=lane.lane, peer=peer, error=str(error))

    async def _go(self, lane: VerbsLane, sock: socket.socket) -> None:
        """Bring the first rail up. The lane is closed when that fails."""
        try:
            await self._loop.create_connection(lambda: lane.control, sock=sock)
            await asyncio.shield(lane.up)
        except BaseException:
            lane.close(PartyLost("the lane was not set up in time"))
            raise

    def _lane(self, peer: Incarnation, *, dialed: bool) -> VerbsLane:
        assert self._maker is not None
        number = LaneId(next(self._lane_numbers))
        lane = VerbsLane(
            LaneParts(
                lane=number,
                me=self._me.incarnation,
                peer=peer,
                dialed=dialed,
                maker=self._maker,
                landings=self._landings,
                liveness=self._settings.liveness,
                receives=self._settings.depths.receive * len(self._settings.devices),
                report=self.post,
                refused=self._refused,
                closed=self._lane_closed,
                log=self._log,
            )
        )
        self._lanes[number] = lane
        self._log.info("lane.up", lane=number, peer=peer, transport="verbs")
        return lane

    def _lane_closed(self, lane: VerbsLane, error: IsthmusError) -> None:
        del self._lanes[lane.lane]
        self._log.info("lane.down", lane=lane.lane, code=error.code, error=error.text)
