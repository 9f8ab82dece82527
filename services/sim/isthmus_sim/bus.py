"""The bus of a world: a broker in memory with a connection for each process, and weather. All seeded.

A message takes the way up to the broker, which looks who listens, and the way down to each of them. Either way of a
connection can be held (a partition: the bytes wait in the sender's buffers) and a connection can be reset, which loses
what is on it. Order is kept per publisher and subject, and no more than that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field

from isthmus_shared.bus.interests import Interest, InterestTable
from isthmus_shared.bus.pending import PendingMessages
from isthmus_shared.bus.port import BusMessage
from isthmus_shared.bus.reach import Reach
from isthmus_shared.bus.refusals import headers_size_bytes, no_responders, too_large, too_late
from isthmus_shared.bus.syntax import check_subject
from isthmus_shared.errors import IsthmusError
from isthmus_shared.messages import subjects
from isthmus_sim.loop import Life, world_loop
from isthmus_sim.trace import Trace
from isthmus_sim.weather import LINGER_S, Weather

_QUIET = (f"{subjects.ROOT}.heartbeat.", "$SRV.", "_INBOX.", "$JS.", "$KV.")
"""Not in the trace: they would bury the rest."""
APART_S = 1e-9
"""Between two messages of one order, since timers of one instant have none."""
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
MAX_HELD = 20_000
"""Messages for one client that takes none, after which the server cuts it off: NATS' slow consumer."""


class Broker:
    """The server's part. `disconnect` and `reconnect` play an outage for every client at once."""

    def __init__(self, weather: Weather, trace: Trace, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self.weather, self.trace = weather, trace
        self.max_payload_bytes = max_payload_bytes
        self.table = InterestTable()
        self.replies: dict[str, tuple[SimBus, asyncio.Future[BusMessage]]] = {}
        self.splits: dict[tuple[str, str], int] = {}
        """(service, service): what the first says does not reach the second, as between two servers of a cluster."""
        self.silenced: set[str] = set()
        """Services whose word that a worker is lost does not come through."""
        self.down = False
        self.clients: list[SimBus] = []
        self.context = copy_context()
        self.loop = world_loop()
        self._inboxes = 0

    def client(self, name: str, life: Life | None = None) -> SimBus:
        """`name`: the service's, a dot, and which of its lives."""
        bus = SimBus(self, name, life)
        if self.down:
            bus.disconnect()
        self.clients.append(bus)
        return bus

    def disconnect(self) -> None:
        self.down = True
        for client in list(self.clients):
            client.disconnect()

    def reconnect(self, *, within_s: float = 0.0) -> None:
        """Each when it notices."""
        self.down = False
        for client in list(self.clients):
            if within_s:
                self.at(self.loop.world_s + self.weather.rng.uniform(0, within_s), self._reconnect, client)
            else:
                client.reconnect()

    def _reconnect(self, client: SimBus) -> None:
        if not self.down:
            client.reconnect()

    def new_inbox(self) -> str:
        self._inboxes += 1
        return f"_INBOX.{self._inboxes}"

    def at(self, when_s: float, callback: Callable[..., object], *args: object, context: Context | None = None) -> None:
        self.loop.at_world(when_s, callback, *args, context=context or self.context)

    def route(self, sender: SimBus, message: BusMessage) -> None:
        """It has arrived here."""
        if self.silenced and message.subject == subjects.WORKER_LOST and sender.service in self.silenced:
            return
        waiting = self.replies.get(message.subject)
        if waiting is not None:
            owner, answer = waiting
            if not self._split(sender, owner):
                owner.receive(sender, message.subject, lambda: _answer(answer, message))
            return
        receivers = self.table.receivers(message.subject)
        if not receivers and message.reply in self.replies:
            _, refused = self.replies[message.reply]
            error = no_responders(message.subject)
            sender.receive(sender, message.subject, lambda: _refuse(refused, error))
        for interest in receivers:
            listener, pending = interest.owner, interest.pending
            assert isinstance(listener, SimBus)
            if not self._split(sender, listener):
                listener.receive(sender, message.subject, lambda pending=pending: pending.offer(message))  # type: ignore[misc]

    def _split(self, sender: SimBus, receiver: SimBus) -> bool:
        return bool(self.splits) and bool(self.splits.get((sender.service, receiver.service)))


def _answer(answer: asyncio.Future[BusMessage], message: BusMessage) -> None:
    if not answer.done():
        answer.set_result(message)


def _refuse(answer: asyncio.Future[BusMessage], error: IsthmusError) -> None:
    if not answer.done():
        answer.set_exception(error)


@dataclass
class _Way:
    """One direction of a connection."""

    held: bool = False
    waiting: list[Callable[[], object]] = field(default_factory=list)
    last_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """By publisher and subject: nothing later may arrive before."""

    def slot_s(self, key: tuple[str, str], at_s: float) -> float:
        at_s = max(at_s, self.last_s.get(key, 0.0) + APART_S)
        self.last_s[key] = at_s
        return at_s


class SimBus(Reach):
    """One process' connection; made by `broker.client()`."""

    def __init__(self, broker: Broker, name: str, life: Life | None) -> None:
        super().__init__()
        self.name, self.service = name, name.rpartition(".")[0] or name
        self.broker = broker
        self._life = life
        self._epoch = 0
        """Grows with each reset: what is on its way on an older connection is lost."""
        self._sending, self._receiving = _Way(), _Way()
        self._interests: list[Interest] = []
        self._limit: int | None = None
        self.max_held = MAX_HELD
        if life is not None:
            life.on_resume = self._release

    # -- the port

    @property
    def max_payload_bytes(self) -> int:
        return self.broker.max_payload_bytes

    def new_inbox(self) -> str:
        return self.broker.new_inbox()

    async def publish(
        self, subject: str, data: bytes, *, reply: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self._send(subject, data, reply, headers)

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> BusMessage:
        """May overtake, and be overtaken by, whatever this process publishes on other subjects."""
        inbox = self.new_inbox()
        answer: asyncio.Future[BusMessage] = asyncio.get_running_loop().create_future()
        self.broker.replies[inbox] = (self, answer)
        self._waiting[answer] = None
        try:
            self._send(subject, data, inbox, headers)
            async with asyncio.timeout(timeout_s):
                found = await answer
        except TimeoutError as error:
            raise too_late(subject, timeout_s) from error
        finally:
            self._waiting.pop(answer, None)
            del self.broker.replies[inbox]
        self._note("answered", subject)
        return found

    @asynccontextmanager
    async def subscribe(
        self, subject: str, *, queue: str | None = None, max_pending: int = 4096
    ) -> AsyncIterator[PendingMessages]:
        check_subject(subject, wildcards=True)
        self._check_connected()
        pending = _Subscription(self, subject, max_pending=max_pending)
        pending.narrow(self._limit)
        interest = Interest(self, pending, queue)
        self.broker.table.add(interest)
        self._interests.append(interest)
        try:
            yield pending
        finally:
            self.withdraw(pending)

    async def close(self) -> None:
        self.end()

    # -- what faults do to it

    def end(self, *, lost: bool = False) -> None:
        """`lost`: what it has said and is still on its way goes with it."""
        if self._closed:
            return
        self._epoch += lost
        self._shut()
        for interest in list(self._interests):
            interest.pending.end()
            self.withdraw(interest.pending)
        self.broker.clients.remove(self)

    def disconnect(self) -> None:
        """As if the connection were reset: waiting requests fail at once, messages pass it by."""
        if self._closed:
            return
        self._epoch += 1
        self._sending.waiting.clear()
        self._receiving.waiting.clear()
        self._lose()

    def hold(self, *, sending: bool, receiving: bool) -> None:
        """From now on nothing passes that way, and nothing is lost either."""
        self._sending.held |= sending
        self._receiving.held |= receiving

    def heal(self) -> None:
        """What was held arrives at once, in order."""
        self._sending.held = self._receiving.held = False
        self._release()

    def narrow(self, limit: int | None) -> None:
        """Its subscriptions hold at most that many messages, or their own bound again."""
        self._limit = limit
        for interest in self._interests:
            assert isinstance(interest.pending, _Subscription)
            interest.pending.narrow(limit)

    def withdraw(self, pending: PendingMessages) -> None:
        for interest in self._interests:
            if interest.pending is pending:
                self._interests.remove(interest)
                self.broker.table.remove(interest)
                pending.end()
                return

    # -- both ways

    def receive(self, sender: SimBus, subject: str, take: Callable[[], object]) -> None:
        """The broker has something for it."""
        way, broker = self._receiving, self.broker
        if self._stuck:
            way.waiting.append(take)
            if len(way.waiting) > self.max_held:
                self._cut_off()
        elif broker.weather.spread_s:
            delay_s = broker.weather.rng.uniform(0, broker.weather.spread_s)
            at_s = way.slot_s((sender.name, subject), broker.loop.world_s + delay_s)
            broker.at(at_s, self._arrived, self._epoch, take)
        else:
            take()

    @property
    def _stuck(self) -> bool:
        return self._receiving.held or (self._life is not None and self._life.paused)

    def _arrived(self, epoch: int, take: Callable[[], object]) -> None:
        if epoch != self._epoch:
            return
        if self._stuck:
            self._receiving.waiting.append(take)
        else:
            take()

    def _release(self) -> None:
        if not self._stuck:
            waiting, self._receiving.waiting = self._receiving.waiting, []
            for take in waiting:
                take()
        if not self._sending.held:
            waiting, self._sending.waiting = self._sending.waiting, []
            for say in waiting:
                say()

    def _cut_off(self) -> None:
        self.broker.trace.note(self.name, "cut off as a slow consumer")
        self.disconnect()
        self.broker.at(self.broker.loop.world_s + self.broker.weather.rng.uniform(0.05, 0.3), self.reconnect)

    def _send(self, subject: str, data: bytes, reply: str | None, headers: Mapping[str, str] | None) -> None:
        check_subject(subject, wildcards=False)
        self._check_connected()
        size_bytes = len(data) + headers_size_bytes(headers)
        if size_bytes > self.max_payload_bytes:
            raise too_large(subject, size_bytes, self.max_payload_bytes)
        weather, now_s = self.broker.weather, self.broker.loop.world_s
        message = BusMessage(subject, bytes(data), reply, dict(headers or {}))
        copies = weather.copies(subject)
        self._note("says" if reply is None else "asks", subject, copies)
        for _ in range(copies):
            at_s = self._sending.slot_s(("", subject), now_s + weather.take_s())
            self.broker.at(at_s, self._sent, self._epoch, message)
        if weather.lingers(subject):
            again = BusMessage(subject, message.data, None, message.headers)
            self.broker.at(now_s + weather.rng.uniform(0, LINGER_S), self._sent, self._epoch, again)

    def _sent(self, epoch: int, message: BusMessage) -> None:
        if epoch != self._epoch:
            return
        if self._sending.held:
            self._sending.waiting.append(lambda: self.broker.route(self, message))
        else:
            self.broker.route(self, message)

    def _note(self, what: str, subject: str, copies: int = 1) -> None:
        if not subject.startswith(_QUIET):
            facts = {} if copies == 1 else {"copies": copies}
            self.broker.trace.note(self.name, what, subject=subject.removeprefix(f"{subjects.ROOT}."), **facts)


class _Subscription(PendingMessages):
    def __init__(self, bus: SimBus, subject: str, *, max_pending: int) -> None:
        super().__init__(subject, max_pending=max_pending)
        self._bus, self._own_limit = bus, max_pending

    def narrow(self, limit: int | None) -> None:
        self._max_pending = self._own_limit if limit is None else min(limit, self._own_limit)

    async def unsubscribe(self) -> None:
        self._bus.withdraw(self)
