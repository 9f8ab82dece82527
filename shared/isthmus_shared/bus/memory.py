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
from isthmus_shared.bus.refusals import disconnected, headers_size_bytes, no_responders, too_large, too_late
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


class MemoryBus:
    """One client of a `MemoryBroker`; made by `broker.client()`."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        self.name = name
        self._broker = broker
        self._up = asyncio.Event()
        self._up.set()
        self._closed = False
        self._outages = 0
        self._interests: list[Interest] = []
        self._waiting: dict[asyncio.Future[BusMessage], None] = {}  # no set: its order would differ from run to run

    @property
    def max_payload_bytes(self) -> int:
        return self._broker.max_payload_bytes

    @property
    def connected(self) -> bool:
        return self._up.is_set() and not self._closed

    @property
    def outages(self) -> int:
        return self._outages

    async def wait_connected(self) -> None:
        while not self.connected:  # it may be away again by the time that a waiter runs
            if self._closed:
                raise disconnected(closed=True)
            await self._up.wait()

    def new_inbox(self) -> str:
        return self._broker._new_inbox()

    def disconnect(self) -> None:
        """As if the network to the broker were cut: waiting requests fail at once, messages pass it by."""
        self._outages += self._up.is_set()
        self._up.clear()
        self._fail_waiting()

    def reconnect(self) -> None:
        if not self._closed:
            self._up.set()

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
        self._closed = True
        self._fail_waiting()
        self._up.set()  # whoever waits for a connection is told that there will be none
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

    def _check_connected(self) -> None:
        if not self.connected:
            raise disconnected(closed=self._closed)

    def _fail_waiting(self) -> None:
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(disconnected(closed=self._closed))


class _MemorySubscription(PendingMessages):
    def __init__(self, bus: MemoryBus, subject: str, *, max_pending: int) -> None:
        super().__init__(subject, max_pending=max_pending)
        self._bus = bus

    async def unsubscribe(self) -> None:
        self._bus._withdraw(self)
