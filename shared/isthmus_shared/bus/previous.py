"""A bus on which a process speaks as the release before, while a cluster is upgraded (ADR 9)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from isthmus_shared.bus.port import Bus, BusMessage, Subscription
from isthmus_shared.messages.versions import as_previous


class PreviousVersionBus:
    """`Bus` over another one: everything that is said goes out in the previous version; what is heard is as it came."""

    def __init__(self, inner: Bus) -> None:
        self._inner = inner

    @property
    def max_payload_bytes(self) -> int:
        return self._inner.max_payload_bytes

    @property
    def connected(self) -> bool:
        return self._inner.connected

    @property
    def outages(self) -> int:
        return self._inner.outages

    async def wait_connected(self) -> None:
        await self._inner.wait_connected()

    def new_inbox(self) -> str:
        return self._inner.new_inbox()

    async def publish(
        self, subject: str, data: bytes, *, reply: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        await self._inner.publish(subject, as_previous(data), reply=reply, headers=headers)

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> BusMessage:
        return await self._inner.request(subject, as_previous(data), timeout_s=timeout_s, headers=headers)

    def subscribe(
        self, subject: str, *, queue: str | None = None, max_pending: int = 4096
    ) -> AbstractAsyncContextManager[Subscription]:
        return self._inner.subscribe(subject, queue=queue, max_pending=max_pending)

    async def close(self) -> None:
        await self._inner.close()
