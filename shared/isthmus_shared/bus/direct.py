"""nats-py's client without the queue and the task that it puts between its parser and a subscriber."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from isthmus_shared.bus.port import BusMessage

Deliver = Callable[[BusMessage], None]
"""Neither waits nor raises: it runs in the client's reader."""


def mover(deliver: Deliver) -> Callable[[Msg], Awaitable[None]]:
    """A callback for `Client.subscribe`. `DirectClient` sees what is in it; any other client calls it."""

    async def move(message: Msg) -> None:
        deliver(BusMessage(message.subject, message.data, message.reply or None, message.headers or {}))

    move.deliver = deliver  # type: ignore[attr-defined]
    return move


class DirectClient(Client):
    """Messages are delivered while they are parsed, in order. `_process_msg` is nats-py's own seam (2.16): were it
    renamed, messages would take the long way, and everything else would stay as it is."""

    async def give_up(self, subscription: Subscription) -> None:
        """Unsubscribe. In the midst of a reconnect nats-py tells nobody, although it may have renewed the subscription
        already; here the server is told once it can be."""
        reconnecting = self.is_reconnecting
        await subscription.unsubscribe()
        if reconnecting:
            await self._send_unsubscribe(subscription._id)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        subscription = self._subs.get(sid)
        if subscription is None:
            # The server has a subscription that was given up here while the connection was away: nobody told it. It
            # would also count the message as delivered twice, and let us answer it no more (`allow_responses`).
            await self._send_unsubscribe(sid)
            return
        deliver: Deliver | None = getattr(subscription._cb, "deliver", None)
        if deliver is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        found = await self._process_headers(headers) if headers else None
        deliver(BusMessage(subject.decode(), data, reply.decode() if reply else None, found or {}))
