"""What Isthmus needs of a message bus: subjects, queue groups, request/reply, bounded subscriptions.

Semantics that both adapters keep (tests/contract/bus):

* at most once; order is kept per publisher and subject;
* `request` raises `NoResponders` at once when nobody listens, `DeadlineExceeded` when nobody answers in time,
  `PayloadTooLarge` before anything is sent, `BusDisconnected` when the bus is out of reach;
* a subscription holds at most `max_pending` undelivered messages; one more is dropped, counted in `dropped`, and
  logged by the subscription's subject: the bus never buffers without bound and never blocks its reader;
* subscriptions are iterated inside a task of the caller's; there are no callbacks;
* after a reconnect every subscription is alive again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BusMessage:
    subject: str
    data: bytes
    reply: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class Subscription(Protocol):
    subject: str

    @property
    def dropped(self) -> int:
        """Messages shed because `max_pending` were waiting."""
        ...

    def __aiter__(self) -> AsyncIterator[BusMessage]: ...

    def take_waiting(self) -> list[BusMessage]:
        """What has come and was not iterated over yet: it is, by this."""
        ...

    async def unsubscribe(self) -> None:
        """No more messages; a waiting iteration ends."""
        ...


class Bus(Protocol):
    @property
    def max_payload_bytes(self) -> int: ...

    @property
    def connected(self) -> bool: ...

    @property
    def outages(self) -> int:
        """How often the bus has gone out of reach so far: when it has grown, messages may have been missed."""
        ...

    async def wait_connected(self) -> None:
        """Until the bus is within reach; at once when it is. `BusDisconnected` once this client is closed."""
        ...

    def new_inbox(self) -> str:
        """A subject that nobody else uses."""
        ...

    async def publish(
        self, subject: str, data: bytes, *, reply: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None: ...

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> BusMessage: ...

    def subscribe(
        self, subject: str, *, queue: str | None = None, max_pending: int = 4096
    ) -> AbstractAsyncContextManager[Subscription]:
        """Wildcards ``*`` and ``>`` as in NATS. On entry the subscription is registered at the server.

        `BusDisconnected` on entry while the bus is out of reach; once entered it survives any outage.
        """
        ...

    async def close(self) -> None:
        """Flush what was published, end every subscription, disconnect. Idempotent."""
        ...
