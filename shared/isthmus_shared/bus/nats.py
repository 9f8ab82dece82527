"""The bus over NATS (nats-py 2.16), with what that client leaves open closed here:

* its pending limit counts wrongly, so messages move at once into our own bounded buffer (`PendingMessages`);
* it buffers publishes during an outage; here they raise `BusDisconnected`;
* its requests wait out their timeout when the connection breaks; here they fail at once;
* its flush sends a PING ahead of commands that still wait, so it proves nothing about them, and a cancelled one leaves
  a future behind that kills its reader; here the server has to send a message of ours back (`_echo`; a listener on
  ``>`` sees it, as it sees every inbox);
* some of its awaits swallow a cancellation, so calls that wait for the server run in a task of their own;
* after most ``-ERR`` lines it closes for good; a new client is made and every subscription is renewed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import nats.errors
import structlog

from isthmus_shared.bus import refusals
from isthmus_shared.bus.client import LoginClient
from isthmus_shared.bus.denied import Denied
from isthmus_shared.bus.direct import mover
from isthmus_shared.bus.ending import end, observe
from isthmus_shared.bus.interest import Interest
from isthmus_shared.bus.login import NO_LOGIN, BusLogin, dialling, shown
from isthmus_shared.bus.pending import PendingMessages
from isthmus_shared.bus.port import BusMessage
from isthmus_shared.bus.syntax import check_subject
from isthmus_shared.errors import BusDisconnected
from isthmus_shared.ids import new_id

RECONNECT_WAIT_S = 0.1
"""Between two attempts at one server: a restarted server is found within a tenth of a second, at ten dials a second."""
PING_INTERVAL_S, MAX_OUTSTANDING_PINGS = 5, 2
"""A connection that died silently is found in (2 + 1) · 5 s."""
SETTLE_TIMEOUT_S = 10
"""For the server to confirm a subscription; it answers in milliseconds unless the connection is dead."""
FLUSH_TIMEOUT_S = 5
"""Longest a publish waits for a full socket."""
QUICK_PENDING_BYTES = 1024 * 1024
"""Not yet written to the socket. nats-py waits for the socket beyond 2 MiB; below a half of that a publish returns at
once."""
RAW_PENDING_MESSAGES = 65536
"""nats-py's own queue in front of our buffer: above what one 32 KiB read can hold (its pump runs between reads)."""
_NO_RESPONDERS_STATUS = "503"


class NatsBus:
    """One connection. Made by `NatsBus.connect`; ended by `close`, or by leaving it as a context."""

    def __init__(self, url: str, *, name: str, login: BusLogin = NO_LOGIN) -> None:
        self._to, self._name = dialling(url, login), name
        self._loop = asyncio.get_running_loop()
        self._log = structlog.get_logger().bind(bus=shown(url))
        self._client = LoginClient(self._to)
        self._up = asyncio.Event()
        self._lost = asyncio.Event()
        self._closed = False
        self._outages = 0
        self._interests: set[Interest] = set()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._replies: dict[str, asyncio.Future[BusMessage]] = {}
        self._denied = Denied(self._to.user)
        self._calls: set[asyncio.Task[None]] = set()
        self._reply_prefix = self.new_inbox()
        self._reply_count = 0
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, url: str, *, name: str, login: BusLogin = NO_LOGIN, timeout_s: float = 30.0) -> Self:
        """`BusDisconnected` if nothing answers within `timeout_s`; from then on it reconnects without end."""
        bus = cls(url, name=name, login=login)
        dialling = asyncio.create_task(bus._dial())
        try:
            await asyncio.wait({dialling}, timeout=timeout_s)
            if not dialling.done():
                raise refusals.no_server(shown(url), bus._client.last_error, timeout_s)
            dialling.result()
        except BaseException:
            await end(dialling)
            await bus.close()
            raise
        bus._keeper = asyncio.create_task(bus._keep(), name="bus-keeper")
        return bus

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def max_payload_bytes(self) -> int:
        return self._client.max_payload

    @property
    def connected(self) -> bool:
        return not self._closed and self._up.is_set() and self._client.is_connected

    @property
    def outages(self) -> int:
        return self._outages

    async def wait_connected(self) -> None:
        while not self.connected:
            if self._closed:
                raise refusals.disconnected(closed=True)
            if not self._client.is_connected:
                self._up.clear()
            await self._up.wait()

    def new_inbox(self) -> str:
        return f"{self._to.inbox}.{new_id('i')}"

    async def publish(
        self, subject: str, data: bytes, *, reply: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        check_subject(subject, wildcards=False)
        if not self.connected:
            raise self._disconnected()
        if self._denied.publishing(subject):
            raise refusals.forbidden("say", subject, self._to.user)
        size_bytes = len(data) + refusals.headers_size_bytes(headers)
        if size_bytes > self.max_payload_bytes:
            raise refusals.too_large(subject, size_bytes, self.max_payload_bytes)
        task = asyncio.current_task(self._loop)
        cancelled_before = task.cancelling() if task is not None else 0
        try:
            await self._client.publish(subject, data, reply=reply or "", headers=dict(headers) if headers else None)
        except nats.errors.MaxPayloadError as error:
            raise refusals.too_large(subject, size_bytes, self.max_payload_bytes) from error
        except (nats.errors.Error, OSError) as error:
            raise self._disconnected() from error
        if task is not None and task.cancelling() > cancelled_before:
            raise asyncio.CancelledError  # nats-py swallows one that arrives while its socket is full

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> BusMessage:
        inbox, answer = self._expect()
        self._denied.asking[answer] = subject
        try:
            if self._client.pending_data_size < QUICK_PENDING_BYTES:
                # The publish can't block: a timer that fails the answer costs less than a timeout's context.
                timer = self._loop.call_later(timeout_s, refusals.fail_late, answer, subject, timeout_s)
                try:
                    await self.publish(subject, data, reply=inbox, headers=headers)
                    message = await answer
                finally:
                    timer.cancel()
            else:
                try:
                    async with asyncio.timeout(timeout_s):
                        await self.publish(subject, data, reply=inbox, headers=headers)
                        message = await answer
                except TimeoutError as error:
                    raise refusals.too_late(subject, timeout_s) from error
        finally:
            del self._denied.asking[answer]
            self._forget(inbox, answer)
        if message.headers and message.headers.get("Status") == _NO_RESPONDERS_STATUS and not message.data:
            raise refusals.no_responders(subject)
        return message

    @asynccontextmanager
    async def subscribe(
        self, subject: str, *, queue: str | None = None, max_pending: int = 4096
    ) -> AsyncIterator[PendingMessages]:
        check_subject(subject, wildcards=True)
        if not self.connected:
            raise self._disconnected()
        pending = _NatsPending(self, subject, max_pending=max_pending)
        interest = Interest(subject, queue, pending.offer, pending.end)
        pending.interest = interest
        try:
            await self._settle(self._register(interest))
            yield pending
        finally:
            await pending.unsubscribe()

    async def close(self) -> None:
        if self._closed:
            return
        if self.connected:
            with contextlib.suppress(BusDisconnected):
                await self._echo()  # what was published before it has reached the server
        self._closed = True
        self._up.set()
        self._fail_waiting()
        for interest in list(self._interests):
            interest.withdrawn = True
            interest.end()
        self._interests.clear()
        if self._keeper is not None:
            await end(self._keeper)
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=SETTLE_TIMEOUT_S)
        with contextlib.suppress(nats.errors.Error, OSError):  # it may try to write to a connection that is gone
            await self._client.close()

    # -- connection ----------------------------------------------------------------------------------------------

    async def _dial(self) -> None:
        """A new client, connected, with every subscription of the last one."""
        client = self._client = LoginClient(self._to)
        self._denied.clear()
        await client.connect(
            self._to.url,
            name=self._name,
            inbox_prefix=self._to.inbox,
            **self._to.options,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # it is slept for: a float will do
            connect_timeout=2,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=MAX_OUTSTANDING_PINGS,
            flush_timeout=FLUSH_TIMEOUT_S,
            skip_subject_validation=True,  # done here
        )
        await self._attach(Interest(f"{self._reply_prefix}.*", None, self._on_reply, self._fail_waiting))
        for interest in list(self._interests):
            await self._attach(interest)
        await self._echo()
        self._up.set()

    async def _keep(self) -> None:
        """Replaces a client that gave up."""
        while True:
            await self._lost.wait()
            self._lost.clear()
            self._log.warning("bus.client_replaced", why=str(self._client.last_error))
            await asyncio.sleep(RECONNECT_WAIT_S)
            try:
                await self._dial()
            except (nats.errors.Error, OSError, BusDisconnected) as error:
                self._log.warning("bus.dial_failed", why=str(error))
                with contextlib.suppress(nats.errors.Error, OSError):
                    await self._client.close()
                self._lost.set()

    async def _attach(self, interest: Interest) -> None:
        interest.handle = await self._client.subscribe(
            interest.subject,
            queue=interest.queue or "",
            cb=mover(interest.deliver),  # neither awaits nor raises, which is what breaks its reader
            pending_msgs_limit=RAW_PENDING_MESSAGES,
            pending_bytes_limit=0,
        )
        if interest.withdrawn:
            await self._detach(interest)

    async def _register(self, interest: Interest) -> None:
        self._interests.add(interest)
        await self._attach(interest)
        await self._echo()
        if self._denied.hearing(interest.subject):  # the server says so before it sends our message back
            raise refusals.forbidden("hear", interest.subject, self._to.user)

    async def _detach(self, interest: Interest) -> None:
        handle, interest.handle = interest.handle, None
        if handle is not None:
            with contextlib.suppress(
                nats.errors.Error, OSError, BusDisconnected
            ):  # closed or replaced: nothing is left to withdraw
                await self._client.give_up(handle)
                await self._echo()

    async def _withdraw(self, interest: Interest) -> None:
        if interest.withdrawn:
            return
        interest.withdrawn = True
        self._interests.discard(interest)
        with contextlib.suppress(BusDisconnected):
            await self._settle(self._detach(interest))

    async def _echo(self) -> None:
        """Every command given before this one has been carried out by the server when this returns."""
        if not self._client.is_connected:
            raise self._disconnected()
        inbox, answer = self._expect()
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self._client.publish(inbox, b"")
                await answer
        except (nats.errors.Error, OSError) as error:  # TimeoutError is an OSError
            raise self._disconnected() from error
        finally:
            self._forget(inbox, answer)

    # -- what nats-py tells us ------------------------------------------------------------------------------------

    async def _on_error(self, error: Exception) -> None:
        if self._denied.take(str(error)):
            self._log.error("bus.forbidden", user=self._to.user, why=str(error))
            return
        # During an outage every attempt to reconnect ends here: ten a second.
        level = logging.WARNING if self.connected else logging.DEBUG
        self._log.log(level, "bus.error", error=type(error).__name__, why=str(error))

    async def _on_disconnected(self) -> None:
        self._outages += 1
        self._up.clear()
        self._fail_waiting()
        if not self._closed:
            self._log.warning("bus.disconnected")

    async def _on_reconnected(self) -> None:
        self._denied.clear()
        self._up.set()
        self._log.info("bus.reconnected")

    async def _on_closed(self) -> None:
        if self._closed:
            self._up.set()
            return
        self._outages += 1
        self._up.clear()
        self._fail_waiting()
        self._lost.set()

    def _on_reply(self, message: BusMessage) -> None:
        answer = self._replies.get(message.subject)
        if answer is not None and not answer.done():
            answer.set_result(message)

    # -- waiting ---------------------------------------------------------------------------------------------------

    async def _settle(self, call: Coroutine[Any, Any, None]) -> None:
        """Run a call that waits for the server. Ends early if the connection breaks or we are cancelled; the call
        itself runs on to its own timeout, since nats-py does not survive its being cancelled."""
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        gone: asyncio.Future[None] = self._future()
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._release(gone)
            task.add_done_callback(observe)
        if not task.done():
            raise self._disconnected()
        error = task.exception()
        if isinstance(error, nats.errors.Error | OSError):
            raise self._disconnected() from error
        if error is not None:
            raise error

    def _expect(self) -> tuple[str, asyncio.Future[BusMessage]]:
        """A subject of ours, and the one message that will come on it. Whoever asks for it calls `_forget` after."""
        self._reply_count += 1
        inbox = f"{self._reply_prefix}.{self._reply_count}"
        answer: asyncio.Future[BusMessage] = self._future()
        self._replies[inbox] = answer
        return inbox, answer

    def _forget(self, inbox: str, answer: asyncio.Future[BusMessage]) -> None:
        del self._replies[inbox]
        self._release(answer)

    def _future(self) -> asyncio.Future[Any]:
        """A future that fails when the connection breaks."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.add(future)
        return future

    def _release(self, future: asyncio.Future[Any]) -> None:
        self._waiting.discard(future)
        if future.done() and not future.cancelled():
            future.exception()  # observed: nobody may be waiting for it any more
        future.cancel()

    def _fail_waiting(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_exception(self._disconnected())

    def _disconnected(self) -> BusDisconnected:
        return refusals.disconnected(closed=self._closed, why=str(self._client.last_error or ""))


class _NatsPending(PendingMessages):
    def __init__(self, bus: NatsBus, subject: str, *, max_pending: int) -> None:
        super().__init__(subject, max_pending=max_pending)
        self._bus = bus
        self.interest: Interest | None = None

    async def unsubscribe(self) -> None:
        self.end()
        if self.interest is not None:
            await self._bus._withdraw(self.interest)
