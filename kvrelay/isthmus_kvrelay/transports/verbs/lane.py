"""One lane over verbs: a control stream and its rails; up, then closed once, for good."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from structlog.typing import FilteringBoundLogger

from isthmus_kvrelay import wire
from isthmus_kvrelay.core.events import (
    ChunkLanded,
    ChunkSent,
    Event,
    ExpectChunk,
    LaneDown,
    LaneId,
    LaneUp,
    RevokeFlow,
    SendChunk,
    SlotQuiet,
)
from isthmus_kvrelay.lane_codec import event_of, messages_of
from isthmus_kvrelay.transports.port import ControlEffect
from isthmus_kvrelay.transports.tcp_lane import as_loss
from isthmus_kvrelay.transports.verbs import messages as say
from isthmus_kvrelay.transports.verbs.control_stream import ControlStream, Liveness
from isthmus_kvrelay.transports.verbs.faults import RailFault
from isthmus_kvrelay.transports.verbs.landings import Landings
from isthmus_kvrelay.transports.verbs.rail import Rail
from isthmus_kvrelay.transports.verbs.rails import RailMaker, Rails
from isthmus_kvrelay.wire import incarnation_digest
from isthmus_shared.errors import IsthmusError, ProtocolViolation
from isthmus_shared.ids import Incarnation

CHAIN_CHUNKS = 8
"""Posted to one rail at a time: one doorbell, and fine enough to spread a flow over several rails."""
TURN_BYTES = 8 << 20
"""Checksummed in one turn of the loop, each way: under a millisecond, so that control is never far behind."""


@dataclass(slots=True)
class LaneParts:
    """What a lane is given by its transport."""

    lane: LaneId
    me: Incarnation
    peer: Incarnation
    dialed: bool
    maker: RailMaker
    landings: Landings
    liveness: Liveness
    receives: int
    """Chunks that the queue pairs of all rails have room for; made, so that the devices have granted them."""
    report: Callable[[Event], None]
    refused: Callable[[], None]
    """A chunk came without credit."""
    closed: Callable[[VerbsLane, IsthmusError], None]
    log: FilteringBoundLogger = field(repr=False)


class VerbsLane:
    """Made by `VerbsTransport` when the peer has proved itself. `control` is the protocol for its connection."""

    def __init__(self, parts: LaneParts) -> None:
        self._parts = parts
        self.lane, self.peer = parts.lane, parts.peer
        self.me, self.peer_digest = incarnation_digest(parts.me), incarnation_digest(parts.peer)
        self._loop = asyncio.get_running_loop()
        self.closing = False
        self.up: asyncio.Future[None] = self._loop.create_future()
        """Done when the peer's side can be written to; an `IsthmusError` when that will never be."""
        self.told_up = False
        self._waiting: deque[SendChunk] = deque()
        """To be posted; bounded by the peer's credit."""
        self._landed: deque[int] = deque()
        """Immediates of writes that completed and are to be verified."""
        self._turn_due = False
        self._rails = Rails(self, parts.maker, parts.peer, dialed=parts.dialed, log=parts.log.bind(lane=parts.lane))
        self.control = ControlStream(
            me=self.me,
            peer=self.peer_digest,
            liveness=parts.liveness,
            on_open=self._rails.open,
            on_message=self._take,
            on_end=self.close,
        )

    # --- effects

    def send(self, effect: ControlEffect) -> None:
        for message in messages_of(effect):
            self.control.write(message)

    def send_chunk(self, job: SendChunk) -> None:
        if not self.closing and not self._rails.fits(job):
            self.close(ProtocolViolation("a peer granted a slot outside its pool"))
        if self.closing:
            self._report_sent(job, ok=False)
            return
        self._waiting.append(job)
        self._turn_soon()

    def expect(self, expected: ExpectChunk) -> None:
        self._parts.landings.arm(expected)

    def revoke(self, effect: RevokeFlow) -> None:
        for ref in self._parts.landings.revoke(self.lane, effect.key):
            self._parts.report(SlotQuiet(ref))

    # --- the peer's words

    def _take(self, message: wire.LaneMessage | say.VerbsMessage) -> None:
        match message:
            case say.RailUp():
                self._rails.take(message)
                self._tell_up()
            case say.RailOffer() | say.RailAnswer() | say.RailRefused() | say.RailDown() | say.Receives():
                self._rails.take(message)
                self._turn_soon()
            case _:
                event = event_of(self.lane, message)
                if event is not None:
                    self._parts.report(event)

    def _tell_up(self) -> None:
        if not self.told_up and not self.closing:
            self.told_up = True
            self._parts.report(LaneUp(self.lane, self.peer, via="verbs", depth=self._parts.receives))
            self.up.set_result(None)

    # --- rails (`rail.RailHost`)

    def say(self, message: say.VerbsMessage) -> None:
        self.control.write(message)

    def rail_works(self, rail: Rail) -> None:
        self._rails.works(rail)
        if self._parts.dialed:
            self._tell_up()
        self._turn_soon()

    def rail_sent(self, rail: Rail, jobs: list[SendChunk]) -> None:
        self._rails.crossed(rail)
        self.chunks_landed(jobs)
        self._turn_soon()

    def rail_landed(self, rail: Rail, imms: list[int]) -> None:
        self._rails.crossed(rail)
        self._landed += imms
        self._turn_soon()

    def rail_failed(self, rail: Rail, fault: RailFault) -> None:
        self._rails.failed(rail, fault)

    def chunks_landed(self, jobs: list[SendChunk]) -> None:
        for job in jobs:
            self._report_sent(job, ok=True)

    def chunks_again(self, jobs: list[SendChunk]) -> None:
        self._waiting.extendleft(reversed(jobs))  # the rail is gone at both ends: they never land through it
        self._turn_soon()

    def rails_gone(self, error: IsthmusError) -> None:
        self.close(error)

    # --- work, a bounded piece in each turn of the loop

    def _turn_soon(self) -> None:
        if not self._turn_due and not self.closing:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_due = False
        if self.closing:
            return
        self._verify(most_bytes=TURN_BYTES)
        self._post(most_bytes=TURN_BYTES)
        if self._landed:
            self._turn_soon()

    def _post(self, *, most_bytes: int) -> None:
        posted_bytes = 0
        while self._waiting and not self.closing:
            rail = self._rails.best()
            if rail is None:
                return  # a completion, the peer's receives or a rail's return come back here
            if posted_bytes >= most_bytes:
                self._turn_soon()
                return
            jobs = [self._waiting.popleft() for _ in range(min(rail.room, CHAIN_CHUNKS, len(self._waiting)))]
            posted_bytes += sum(job.size_bytes for job in jobs)
            rail.send(jobs)

    def _verify(self, *, most_bytes: int) -> None:
        done_bytes = 0
        while self._landed and not self.closing and done_bytes < most_bytes:
            imm = self._landed.popleft()
            try:
                found = self._parts.landings.completed(self.lane, imm, sender=self.peer_digest, receiver=self.me)
            except ProtocolViolation as error:
                self.close(error)
                return
            if found is None:
                self._parts.refused()
                continue
            expected, intact = found
            done_bytes += expected.size_bytes
            self._parts.report(ChunkLanded(self.lane, expected.key, expected.chunk, expected.into, intact))

    def _report_sent(self, job: SendChunk, *, ok: bool) -> None:
        self._parts.report(ChunkSent(self.lane, job.key, job.chunk, job.out_of, ok))

    # --- end

    def close(self, error: IsthmusError) -> None:
        """Both directions at once: when it returns no adapter touches a slot for this lane. Idempotent."""
        if self.closing:
            return
        self.closing = True
        self.control.close()
        self._parts.report(LaneDown(self.lane, as_loss(error).to_fault()))  # before any LaneUp: the core ignores it
        for job in self._rails.close():
            self._report_sent(job, ok=False)
        for job in self._waiting:
            self._report_sent(job, ok=False)
        self._waiting.clear()
        for ref in self._parts.landings.lane_gone(self.lane):
            self._parts.report(SlotQuiet(ref))
        if not self.up.done():
            self.up.set_exception(error)
            self.up.exception()  # the acceptor does not wait for it
        self._parts.closed(self, error)
