"""A lane's control stream: the peers' words as events and back, and pings that tell a silent peer from an idle one.

With RDMA the pings are the only way to learn that a sender is gone: its receiver's queues just stay silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from pydantic import BaseModel

from isthmus_kvrelay import wire
from isthmus_kvrelay.transports.verbs.messages import ADAPTER, VerbsMessage
from isthmus_shared.errors import IsthmusError, PartyLost, ProtocolViolation

MAX_UNSENT_CONTROL_BYTES = 16 << 20
"""A peer that lets this much control traffic pile up is not reading; its lane is closed."""


@dataclass(frozen=True, slots=True)
class Liveness:
    ping_interval_s: float = 1.0
    ping_timeout_s: float = 5.0


class ControlStream(asyncio.Protocol):
    """Ends once, by `on_end`: when the peer is lost, silent or at fault. `close` ends it without a word."""

    def __init__(
        self,
        *,
        me: bytes,
        peer: bytes,
        liveness: Liveness,
        on_open: Callable[[], None],
        on_message: Callable[[wire.LaneMessage | VerbsMessage], None],
        on_end: Callable[[IsthmusError], None],
    ) -> None:
        """`me`, `peer`: digests of the incarnations."""
        self._me, self._peer, self._liveness = me, peer, liveness
        self._on_open, self._on_message, self._on_end = on_open, on_message, on_end
        self._reader = wire.MessageReader(ADAPTER, sender=peer, receiver=me)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unanswered = 0
        self._over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by isinstance
        if self._over:
            self._transport.abort()
            return
        self._on_open()
        self._ping()

    def data_received(self, data: bytes) -> None:
        self._unanswered = 0
        if self._over:
            return
        try:
            for message in self._reader.feed(data):
                match message:
                    case wire.Ping():
                        self.write(wire.Pong())
                    case wire.Pong():
                        pass
                    case _:
                        self._on_message(message)
                if self._over:
                    return
        except ProtocolViolation as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(PartyLost("the lane to a peer was lost", why=str(exc) if exc else "the peer closed it"))

    def _ping(self) -> None:
        if self._over:
            return
        # Counted in pings, not in seconds: a stall of this process' own loop must not look like the peer's silence.
        if self._unanswered * self._liveness.ping_interval_s > self._liveness.ping_timeout_s:
            why = f"{self._unanswered} pings were not answered"
            self._end(PartyLost("the lane to a peer was lost", why=why))
            return
        self._unanswered += 1
        self.write(wire.Ping())
        self._timer = self._loop.call_later(self._liveness.ping_interval_s, self._ping)

    def write(self, message: BaseModel | wire.EagerPull) -> None:
        if self._over or self._transport is None:
            return
        self._transport.write(wire.encode_control(message, sender=self._me, receiver=self._peer))
        if self._transport.get_write_buffer_size() > MAX_UNSENT_CONTROL_BYTES:
            self._end(PartyLost("the lane to a peer was lost", why="the peer does not read its control stream"))

    def _end(self, error: IsthmusError) -> None:
        if not self._over:
            self.close()
            self._on_end(error)

    def close(self) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
