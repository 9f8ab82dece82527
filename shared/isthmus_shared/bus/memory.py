"""The bus inside one event loop: a `MemoryBroker`, and a `MemoryBus` for each client of it.

Delivery happens inside `publish`, in the order of subscription, and a queue group takes turns: nothing is random, so
a simulation's trace repeats. Semantics are those of the port; the contract suite holds both adapters to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from isthmus_shared.bus.interests import Interest, InterestTable
from isthmus_shared.bus.pending import PendingMessages
from isthmus_shared.bus.port import BusMessage
from isthmus_shared.bus.reach import Reach
from isthmus_shared.bus.refusals import headers_size_bytes, no_responders, too_large, too_late
from isthmus_shared.bus.syntax import INBOX, check_subject

DEFAULT_MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""As the embedded server: a prompt of a million tokens fits in one message."""


class MemoryBroker:
    """The server's part. `disconnect` and `reconnect` play an outage for every client at once."""

    def __init__(self, *, max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES) -> None:
        self.max_payload_bytes = max_payload_bytes
        self._table = InterestTable()
        self._replies: dict[str, tuple[MemoryBus, asyncio.Future[BusMessage]]] = {}
        self._clients: list[MemoryBus] = []
        self._inboxes = 0

    def client(self, name: str = "client") -> MemoryBus:
        bus = MemoryBus(self, name)
        self._clients.append(bus)
        return bus

    def disconnect(self) -> None:
        for client in list(self._clients):
            client.disconnect()

    def reconnect(self) -> None:
        for client in list(self._clients):
            client.reconnect()

    @property
    def subscriptions(self) -> tuple[str, ...]:
        """Every registered subject or pattern, for tests that look for leaks."""
        return self._table.subjects

    def _new_inbox(self) -> str:
        self._inboxes += 1
        return f"{INBOX}.{self._inboxes}"

    def _deliver(self, message: BusMessage) -> int:
        """Returns how many got it."""
        waiting = self._replies.get(message.subject)
        if waiting is not None:
            owner, reply = waiting
            if owner.connected and not reply.done():
                reply.set_result(message)
            return 1
        receivers = self._table.receivers(message.subject)
        for interest in receivers:
            interest.pending.offer(message)
        return len(receivers)

    def _forget(self, client: MemoryBus) -> None:
        self._clients.remove(client)


class MemoryBus(Reach):
    """One client of a `MemoryBroker`; made by `broker.client()`."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        super().__init__()
        self.name = name
        self._broker = broker
        self._interests: list[Interest] = []

    @property
    def max_payload_bytes(self) -> int:
        return self._broker.max_payload_bytes

    def new_inbox(self) -> str:
        return self._broker._new_inbox()

    def disconnect(self) -> None:
        """As if the network to the broker were cut: waiting requests fail at once, messages pass it by."""
        self._lose()

    async def publish(
        self, subject: str, data: bytes, *, reply: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self._send(subject, data, reply=reply, headers=headers)

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> BusMessage:
        inbox = self.new_inbox()
        answer: asyncio.Future[BusMessage] = asyncio.get_running_loop().create_future()
        self._broker._replies[inbox] = (self, answer)
        self._waiting[answer] = None
        try:
            if self._send(subject, data, reply=inbox, headers=headers) == 0:
                raise no_responders(subject)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise too_late(subject, timeout_s) from error
        finally:
            self._waiting.pop(answer, None)
            del self._broker._replies[inbox]

    @asynccontextmanager
    async def subscribe(
        self, subject: str, *, queue: str | None = None, max_pending: int = 4096
    ) -> AsyncIterator[PendingMessages]:
        check_subject(subject, wildcards=True)
        self._check_connected()
        interest = Interest(self, _MemorySubscription(self, subject, max_pending=max_pending), queue)
        self._broker._table.add(interest)
        self._interests.append(interest)
        try:
            yield interest.pending
        finally:
            self._withdraw(interest.pending)

    async def close(self) -> None:
        if self._closed:
            return
        self._shut()
        for interest in list(self._interests):
            interest.pending.end()
            self._withdraw(interest.pending)
        self._broker._forget(self)

    def _send(self, subject: str, data: bytes, *, reply: str | None, headers: Mapping[str, str] | None) -> int:
        check_subject(subject, wildcards=False)
        self._check_connected()
        size_bytes = len(data) + headers_size_bytes(headers)
        if size_bytes > self.max_payload_bytes:
            raise too_large(subject, size_bytes, self.max_payload_bytes)
        return self._broker._deliver(BusMessage(subject, bytes(data), reply, dict(headers or {})))

    def _withdraw(self, pending: PendingMessages) -> None:
        for interest in self._interests:
            if interest.pending is pending:
                self._interests.remove(interest)
                self._broker._table.remove(interest)
                pending.end()
                return


class _MemorySubscription(PendingMessages):
    def __init__(self, bus: MemoryBus, subject: str, *, max_pending: int) -> None:
        super().__init__(subject, max_pending=max_pending)
        self._bus = bus

    async def unsubscribe(self) -> None:
        self._bus._withdraw(self)
