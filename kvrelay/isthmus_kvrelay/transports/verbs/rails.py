"""A lane's rails: made, probed, quarantined when their path fails, and tried again; the lane ends with the last."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from structlog.typing import FilteringBoundLogger

from isthmus_kvrelay.core.events import SendChunk
from isthmus_kvrelay.transports.verbs import messages as say
from isthmus_kvrelay.transports.verbs.binding import Depths, PathSettings
from isthmus_kvrelay.transports.verbs.faults import RailFault, refused
from isthmus_kvrelay.transports.verbs.health import RailHealth
from isthmus_kvrelay.transports.verbs.memory import Adapter, PoolMemory
from isthmus_kvrelay.transports.verbs.rail import Rail, RailHost, RailState
from isthmus_shared.errors import IsthmusError, NoCapacity, PartyLost, ProtocolViolation
from isthmus_shared.ids import Incarnation

LAST_WORD_S = 5.0
"""For a peer to say what had landed through a rail that is down; it does so at once, or its lane is not to be kept."""


class RailsHost(RailHost, Protocol):
    closing: bool
    told_up: bool
    """The core knows of the lane."""

    def chunks_landed(self, jobs: list[SendChunk]) -> None: ...

    def chunks_again(self, jobs: list[SendChunk]) -> None: ...

    def rails_gone(self, error: IsthmusError) -> None: ...


@dataclass(frozen=True, slots=True)
class RailMaker:
    """What the transport shares with every lane."""

    adapters: tuple[Adapter, ...]
    memory: PoolMemory
    health: RailHealth
    depths: Depths
    path: PathSettings
    failures: Counter[str] = field(default_factory=Counter)
    """Rails that failed, by the status of the request that told (or "refused": a call, or the peer's word)."""
    joining: set[asyncio.Future[None]] = field(default_factory=set)
    """Threads that use a queue pair; the devices must outlive them."""

    def make(self, host: RailHost, *, index: int, attempt: int) -> Rail:
        return Rail(
            host,
            self.adapters[index],
            self.memory,
            index=index,
            attempt=attempt,
            depths=self.depths,
            path=self.path,
        )


class Rails:
    def __init__(
        self, host: RailsHost, maker: RailMaker, peer: Incarnation, *, dialed: bool, log: FilteringBoundLogger
    ) -> None:
        self._host, self._maker, self._peer, self._dialed, self._log = host, maker, peer, dialed, log
        self._loop = asyncio.get_running_loop()
        self._rails: dict[int, Rail] = {}
        self._attempts: dict[int, int] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        """Per rail: until it is tried again, or until the peer must have had its last word."""
        self._last_fault: IsthmusError = PartyLost("the lane to a peer has no rail")

    # --- the dialer's part

    def open(self) -> None:
        """The control stream is there. The dialer offers every rail that is not in quarantine, or else all."""
        if not self._dialed:
            return
        waits_s = {index: self._left_s(index) for index in range(len(self._maker.adapters))}
        if all(waits_s.values()):
            waits_s = dict.fromkeys(waits_s, 0.0)
        for index, wait_s in waits_s.items():
            if wait_s:
                self._again_in(index, wait_s)
            else:
                self._offer(index)
        self._end_if_none()

    def _offer(self, index: int) -> None:
        self._timers.pop(index, None)
        attempt = self._attempts[index] = self._attempts.get(index, 0) + 1
        try:
            rail = self._maker.make(self._host, index=index, attempt=attempt)
        except OSError as error:
            self._quarantine(index, refused(self._maker.adapters[index].name, error))
            self._again_in(index, self._left_s(index))
            return
        self._rails[index] = rail
        self._host.say(rail.offer())

    def _left_s(self, index: int) -> float:
        return self._maker.health.left_s(self._maker.adapters[index].name, self._peer, now_s=self._loop.time())

    def _again_in(self, index: int, wait_s: float) -> None:
        self._timers[index] = self._loop.call_later(wait_s, self._offer, index)

    def _quarantine(self, index: int, fault: RailFault) -> None:
        self._last_fault = fault.to_error()
        self._maker.failures[fault.cause] += 1
        device = self._maker.adapters[index].name
        wait_s = self._maker.health.failed(device, self._peer, now_s=self._loop.time())
        self._log.warning("rail.quarantined", rail=index, device=device, why=fault.why, for_s=wait_s)

    # --- the peer's words

    def take(self, message: say.VerbsMessage) -> None:
        if isinstance(message, say.RailOffer):
            self._offered(message)
            return
        rail = self._rails.get(message.rail)
        if rail is None or rail.attempt != message.attempt:
            return  # of an attempt that is over
        match message:
            case say.RailAnswer() if self._dialed and rail.state is RailState.CONNECTING:
                self._join(rail, message, rail.probe)
            case say.RailUp() if not self._dialed and rail.state is RailState.CONNECTED:
                rail.probe()
            case say.RailRefused() if self._dialed and rail.state is RailState.CONNECTING:
                self._refused(rail, message)
            case say.Receives() if rail.window is not None:
                rail.window.peer_posted(message.posted)
            case say.RailDown():
                self._peer_down(rail, message)
            case _:
                raise ProtocolViolation(f"{message.kind} in the middle of a rail's life")

    def _offered(self, offer: say.RailOffer) -> None:
        index, old = offer.rail, self._rails.get(offer.rail)
        if self._dialed or (old is not None and (old.state is not RailState.ENDED or offer.attempt <= old.attempt)):
            raise ProtocolViolation("a rail was offered that cannot be")
        if index >= len(self._maker.adapters):
            self._refuse(offer, NoCapacity(f"the peer has {len(self._maker.adapters)} adapters"))
            return
        try:
            rail = self._maker.make(self._host, index=index, attempt=offer.attempt)
        except OSError as error:
            self._refuse(offer, refused(self._maker.adapters[index].name, error).to_error())
            return
        self._rails[index] = rail
        self._join(rail, offer, lambda: self._host.say(rail.answer()))

    def _refuse(self, offer: say.RailOffer, error: IsthmusError) -> None:
        self._host.say(say.RailRefused(rail=offer.rail, attempt=offer.attempt, fault=error.to_fault()))

    def _join(self, rail: Rail, remote: say.RailOffer | say.RailAnswer, then: Callable[[], None]) -> None:
        def joined(error: OSError | None) -> None:
            if error is not None:
                self.failed(rail, refused(rail.name, error))
            else:
                then()

        joining = rail.join(remote, joined)
        self._maker.joining.add(joining)
        joining.add_done_callback(self._maker.joining.discard)

    def _refused(self, rail: Rail, message: say.RailRefused) -> None:
        rail.stop()
        rail.end()
        self._last_fault = message.fault.to_error()
        if message.fault.code != NoCapacity.code:
            self._quarantine(rail.index, RailFault(rail.name, message.fault.what))
            self._again_in(rail.index, self._left_s(rail.index))
        self._end_if_none()

    # --- life of a rail

    def works(self, rail: Rail) -> None:
        self._log.info("rail.up", rail=rail.index, device=rail.name, attempt=rail.attempt)
        if self._dialed:
            self._host.say(say.RailUp(rail=rail.index, attempt=rail.attempt))

    def crossed(self, rail: Rail) -> None:
        """Chunks have, not only a probe."""
        self._maker.health.worked(rail.name, self._peer)

    def failed(self, rail: Rail, fault: RailFault) -> None:
        """Its queue pair is destroyed here; the peer does the same and says what had landed."""
        if self._host.closing or rail.state in (RailState.STOPPED, RailState.ENDED):
            return
        self._log.warning("rail.failed", rail=rail.index, device=rail.name, why=fault.why)
        if not fault.of_path:
            self._maker.failures[fault.cause] += 1
            self._host.rails_gone(fault.to_error())
            return
        self._down(rail, fault)
        self._timers[rail.index] = self._loop.call_later(LAST_WORD_S, self._no_last_word)
        self._end_if_none()

    def _down(self, rail: Rail, fault: RailFault) -> None:
        rail.stop()
        self._quarantine(rail.index, fault)
        down = say.RailDown(rail=rail.index, attempt=rail.attempt, landed=rail.landed, why=fault.why[:1_000])
        self._host.say(down)

    def _peer_down(self, rail: Rail, message: say.RailDown) -> None:
        if rail.state is RailState.ENDED:
            raise ProtocolViolation("a rail went down twice")
        rail.peer_landed = message.landed
        if rail.window is not None and message.landed > rail.window.posted:
            raise ProtocolViolation("a peer counted more chunks than were sent to it")
        if rail.state is not RailState.STOPPED:
            self._down(rail, RailFault(rail.name, f"the peer: {message.why}"))
        if (timer := self._timers.pop(rail.index, None)) is not None:
            timer.cancel()
        landed, again = rail.end()
        self._host.chunks_landed(landed)
        self._host.chunks_again(again)
        if self._dialed:
            self._again_in(rail.index, self._left_s(rail.index))
        self._end_if_none()

    def _no_last_word(self) -> None:
        self._host.rails_gone(PartyLost("the lane to a peer was lost", why="it did not say what had landed"))

    def _end_if_none(self) -> None:
        if not self._dialed and not self._host.told_up:
            return  # more offers may come; the time for setting up bounds it
        alive = [rail for rail in self._rails.values() if rail.state not in (RailState.STOPPED, RailState.ENDED)]
        if not alive and not self._host.closing:
            self._host.rails_gone(self._last_fault)

    # --- sending

    def best(self) -> Rail | None:
        """The rail with room that has the least on its way."""
        ready = [rail for rail in self._rails.values() if rail.room]
        return min(ready, key=lambda rail: rail.window.in_flight_bytes if rail.window else 0) if ready else None

    def fits(self, job: SendChunk) -> bool:
        return any(rail.fits(job) for rail in self._rails.values())

    # --- end

    def close(self) -> list[SendChunk]:
        """Destroy every queue pair; returns what was posted and is not known to have landed."""
        left = []
        for timer in self._timers.values():
            timer.cancel()
        for rail in self._rails.values():
            rail.stop()
            if rail.state is RailState.STOPPED:
                landed, unknown = rail.end()
                left += landed + unknown
        return left
