"""What the daemon asks of a transport between relays: carry out effects, report events (see `core.events`).

Everything is called on the event loop's thread; events come back there too, through the `emit` that the transport was
made with, never from within a call. The promises at the head of `core.events` are the transport's to keep.
"""

from __future__ import annotations

from typing import Protocol

from isthmus_kvrelay.compiled.load import Loading
from isthmus_kvrelay.core.events import (
    CloseLane,
    Dial,
    Event,
    ExpectChunk,
    RevokeFlow,
    SendAbort,
    SendChunk,
    SendCredit,
    SendDeclined,
    SendDone,
    SendFeedback,
    SendOpened,
    SendPull,
    SendQuiet,
    SendRevoke,
)


class Emit(Protocol):
    def __call__(self, *events: Event) -> None:
        """In order. Those that come at once cost less together than one by one."""
        ...


ControlEffect = (
    SendPull | SendDeclined | SendOpened | SendCredit | SendDone | SendAbort | SendRevoke | SendQuiet | SendFeedback
)
"""What `lane_codec` turns into control frames."""


class Transport(Protocol):
    async def start(self) -> str:
        """Listen; returns the address (host:port) that peers may dial."""
        ...

    def dial(self, effect: Dial) -> None: ...

    def send(self, effect: ControlEffect) -> None:
        """In order per lane. For a lane that is gone: nothing."""
        ...

    def send_chunk(self, effect: SendChunk) -> None: ...

    def expect(self, effect: ExpectChunk) -> None: ...

    def revoke(self, effect: RevokeFlow) -> None: ...

    def close_lane(self, effect: CloseLane) -> None: ...

    async def watch(self) -> None:
        """Returns when the transport is closed; raises if a bug has stopped it. A relay must not live on without it."""
        ...

    async def close(self) -> None:
        """Close every lane and the listener; no thread, socket or task of the transport is left. Idempotent."""
        ...


class CountedTransport(Transport, Protocol):
    """What the daemon tells of it besides."""

    @property
    def uncredited_chunks(self) -> int:
        """Chunks refused because no credit was out for them (any more)."""
        ...

    @property
    def loading(self) -> Loading: ...
