"""A process of the release before, as far as the bus can tell: it says what that release said, and what it hears it
reads as strictly as that release did."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgpack

from isthmus_shared.bus.port import Bus, BusMessage, Subscription
from isthmus_shared.bus.previous import PreviousVersionBus
from isthmus_shared.messages.base import PREVIOUS

Shape = dict[str, "Shape | None"]


def shape_of(value: Any) -> Shape | None:
    """The fields of a sample that has them all, nested."""
    if isinstance(value, list):
        return shape_of(value[0]) if value else None
    return {name: shape_of(each) for name, each in value.items()} if isinstance(value, dict) else None


def unknown_in(value: Any, shape: Shape | None, where: str = "") -> list[str]:
    """Fields that the sample lacks."""
    if shape is None or not isinstance(value, list | dict):
        return []
    if isinstance(value, list):
        return [text for each in value for text in unknown_in(each, shape, where)]
    found = [f"{where}.{name}" for name in value if name not in shape]
    for name in value:
        found += unknown_in(value[name], shape.get(name), f"{where}.{name}")
    return found


class OldReleaseBus(PreviousVersionBus):
    """`refused` has what that release would not have understood; such a message is lost on it."""

    def __init__(self, inner: Bus, samples: Mapping[str, bytes]) -> None:
        super().__init__(inner)
        unpacked = {kind: msgpack.unpackb(data) for kind, data in samples.items()}
        self._shapes = {kind: shape_of(fields) for kind, fields in unpacked.items()}
        self.heard: set[str] = set()
        self.refused: list[str] = []

    def _reads(self, data: bytes) -> bool:
        fields = msgpack.unpackb(data)
        kind = fields["kind"]
        problems = [f"version {fields['v']}"] if fields["v"] != PREVIOUS else []
        if kind not in self._shapes:
            problems.append("no such message")
        else:
            problems += unknown_in(fields, self._shapes[kind])
        self.heard.add(kind)
        self.refused += [f"{kind}: {problem}" for problem in problems]
        return not problems

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> BusMessage:
        answer = await super().request(subject, data, timeout_s=timeout_s, headers=headers)
        self._reads(answer.data)
        return answer

    @asynccontextmanager
    async def subscribe(  # type: ignore[override]
        self, subject: str, *, queue: str | None = None, max_pending: int = 4096
    ) -> AsyncIterator[Subscription]:
        async with super().subscribe(subject, queue=queue, max_pending=max_pending) as inner:
            yield _Reading(self, inner)


class _Reading:
    def __init__(self, bus: OldReleaseBus, inner: Subscription) -> None:
        self._bus, self._inner, self.subject = bus, inner, inner.subject

    @property
    def dropped(self) -> int:
        return self._inner.dropped

    async def __aiter__(self) -> AsyncIterator[BusMessage]:
        async for message in self._inner:
            if self._bus._reads(message.data):
                yield message

    def take_waiting(self) -> list[BusMessage]:
        return [message for message in self._inner.take_waiting() if self._bus._reads(message.data)]

    async def unsubscribe(self) -> None:
        await self._inner.unsubscribe()
