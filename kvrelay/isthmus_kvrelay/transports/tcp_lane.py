"""One TCP lane: a control stream on the event loop and data streams in threads; up, then closed once, for good."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Sequence
from typing import cast

from isthmus_kvrelay import wire
from isthmus_kvrelay.core.events import Event, LaneDown, LaneId, LaneUp, SendChunk, SlotQuiet
from isthmus_kvrelay.lane_codec import event_of, messages_of
from isthmus_kvrelay.transports.port import ControlEffect
from isthmus_kvrelay.transports.stream import Stream
from isthmus_kvrelay.transports.tcp_streams import Ends, not_sent, start_threads
from isthmus_shared.errors import IsthmusError, PartyLost, ProtocolViolation, Retry, TransferFailed
from isthmus_shared.ids import Incarnation

MAX_UNSENT_CONTROL_BYTES = 16 << 20
"""A peer that lets this much control traffic pile up is not reading; its lane is closed."""

JOIN_POLL_S = 0.002


class TcpLane(asyncio.Protocol):
    """Made by `TcpTransport` when all streams of a lane have joined; also the protocol of its control stream."""

    def __init__(
        self,
        ends: Ends,
        *,
        peer: Incarnation,
        data: Sequence[Stream],
        ping_interval_s: float,
        ping_timeout_s: float,
        report: Callable[[Event], None],
        deliver: Callable[[Sequence[Event]], None],
        on_closing: Callable[[TcpLane, IsthmusError], None],
    ) -> None:
        self.ends = ends
        self._peer, self._data = peer, data
        self._ping_interval_s, self._ping_timeout_s = ping_interval_s, ping_timeout_s
        self._report, self._deliver, self._on_closing = report, deliver, on_closing
        self._reader = wire.ControlReader(sender=ends.peer, receiver=ends.me)
        self._loop = asyncio.get_running_loop()
        self._unanswered = 0
        self._timer: asyncio.TimerHandle | None = None
        self._control: asyncio.Transport | None = None
        self.closing = False
        self._threads = start_threads(ends, data)

    @property
    def lane(self) -> LaneId:
        return self.ends.lane

    # --- control stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's are none by isinstance
        self._control = transport
        if self.closing:
            transport.abort()
            return
        self._report(LaneUp(self.lane, self._peer))
        self._ping()

    def data_received(self, data: bytes) -> None:
        self._unanswered = 0
        if self.closing:
            return
        events: list[Event] = []
        try:
            for message in self._reader.feed(data):
                event = event_of(self.lane, message)
                if event is not None:
                    events.append(event)
                elif isinstance(message, wire.Ping):
                    self._write(wire.Pong())
        except ProtocolViolation as error:
            self._deliver(events)
            self.close(error)
        else:
            self._deliver(events)

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(PartyLost("the lane to a peer was lost", why=str(exc) if exc else "the peer closed it"))

    def _ping(self) -> None:
        # Counted in pings, not in seconds: a stall of this process' own loop must not look like the peer's silence.
        if self._unanswered * self._ping_interval_s > self._ping_timeout_s:
            why = f"{self._unanswered} pings were not answered"
            self.close(PartyLost("the lane to a peer was lost", why=why))
            return
        self._unanswered += 1
        self._write(wire.Ping())
        self._timer = self._loop.call_later(self._ping_interval_s, self._ping)

    def send(self, effect: ControlEffect) -> None:
        for message in messages_of(effect):
            self._write(message)

    def _write(self, message: wire.LaneMessage) -> None:
        if self.closing or self._control is None:
            return
        self._control.write(wire.encode_control(message, sender=self.ends.me, receiver=self.ends.peer))
        if self._control.get_write_buffer_size() > MAX_UNSENT_CONTROL_BYTES:
            self.close(PartyLost("the lane to a peer was lost", why="the peer does not read its control stream"))

    # --- data streams

    def send_chunk(self, job: SendChunk) -> None:
        if self.closing:
            self._report(not_sent(job))
        else:
            self.ends.jobs.put(job)

    # --- end

    def close(self, error: IsthmusError) -> None:
        """Stop both directions at once; `finish` must follow. Idempotent."""
        if self.closing:
            return
        self.closing = True
        if self._timer is not None:
            self._timer.cancel()
        if self._control is not None:
            self._control.abort()
        for stream in self._data:
            stream.shut()
            self.ends.jobs.put(None)  # one per sending thread
        self._report(LaneDown(self.lane, as_loss(error).to_fault()))  # without a LaneUp before it, the core ignores it
        self._on_closing(self, error)

    async def finish(self) -> None:
        """Wait for the threads, then report what they left: no slot of this lane is touched after that."""
        # They end in milliseconds. Another thread that waits for them might not be had.
        while any(thread.is_alive() for thread in self._threads):  # noqa: ASYNC110  no thread sets an asyncio event
            await asyncio.sleep(JOIN_POLL_S)
        for stream in self._data:
            stream.close()
        while True:
            try:
                job = self.ends.jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                self._report(not_sent(job))
        for ref in self.ends.landing.revoke_lane(self.lane):
            self._report(SlotQuiet(ref))


def as_loss(error: IsthmusError) -> IsthmusError:
    """What a transfer's parties are told: a peer at fault is no reason not to try elsewhere."""
    if error.retry is Retry.NEVER:
        return TransferFailed("the peer of the transfer was closed", why=error.text)
    return error
