"""What a producer tells a consumer on its node directly, and what a consumer makes of it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator

import pytest

from isthmus_kvrelay import control
from isthmus_kvrelay.client.bell import Bell
from isthmus_kvrelay.client.sink import RelaySink
from isthmus_kvrelay.client.source import RelaySource
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_shared.errors import Cancelled, DeadlineExceeded, PartyLost
from isthmus_testing.relay_world import flow

SLOT_BYTES = 64
KEY = flow("t", 1)


@pytest.fixture
def pool() -> Iterator[SharedPool]:
    pool = SharedPool.create(pool_bytes=8 * SLOT_BYTES, slot_bytes=SLOT_BYTES)
    yield pool
    pool.close()


class Ends:
    def __init__(self, pool: SharedPool, *, deadline_s: float = 60.0) -> None:
        self.said: list[control.ClientMessage] = []
        facts = {"total_bytes": 2 * SLOT_BYTES, "pool": pool}
        self.sink = RelaySink(KEY, slots=(3, 5), chunk_bytes=SLOT_BYTES, post=self.said.append, **facts)
        self.source = RelaySource(KEY, pull=1, deadline_s=deadline_s, post=self.said.append, **facts)

    def kinds(self) -> list[str]:
        return [message.kind for message in self.said]


async def test_a_ring_carries_a_token_to_the_bell_of_that_name_only() -> None:
    heard: dict[str, list[bytes]] = {"a": [], "b": []}
    came = asyncio.Event()

    def rung(data: bytes) -> None:
        heard["a"].append(data)
        came.set()

    a, b = Bell(rung), Bell(heard["b"].append)
    try:
        async with asyncio.timeout(30):
            for token in (secrets.token_bytes(control.TOKEN_BYTES), b"x" * 100):
                came.clear()
                b.ring(a.name, token)
                await came.wait()
        assert [len(data) for data in heard["a"]] == [control.TOKEN_BYTES, control.TOKEN_BYTES + 1]
        assert heard["b"] == []
    finally:
        a.close()
        b.close()
    a.close()


async def test_ringing_where_nobody_is_does_nothing() -> None:
    bell = Bell(lambda data: None)
    for name in (b"\0isthmus-nobody", b"\0" + b"x" * 200, b"/no/such/file"):
        bell.ring(name, b"t" * control.TOKEN_BYTES)
    bell.close()
    bell.ring(b"\0isthmus-nobody", b"t" * control.TOKEN_BYTES)


def test_a_sealed_sink_rings_before_its_relay_hears_of_it(pool: SharedPool) -> None:
    async def run() -> None:
        ends = Ends(pool)
        ends.sink.attached(lambda: ends.said.append(control.Bye()))
        ends.sink.filled(0, SLOT_BYTES)
        ends.sink.filled(SLOT_BYTES, SLOT_BYTES)
        ends.sink.seal()
        assert ends.kinds()[-2:] == ["bye", "seal"]
        ends.sink.seal()
        assert ends.kinds().count("bye") == 1

    asyncio.run(run())


def test_an_unsealed_sink_never_rings(pool: SharedPool) -> None:
    async def run() -> None:
        ends, rings = Ends(pool), list[int]()
        ends.sink.attached(lambda: rings.append(1))
        ends.sink.filled(0, 2 * SLOT_BYTES)
        ends.sink.abort(Cancelled("x").to_fault())
        assert rings == []

    asyncio.run(run())


def test_a_rung_source_is_ready_where_it_was_attached_and_says_that_it_was_consumed(pool: SharedPool) -> None:
    async def run() -> None:
        ends = Ends(pool)
        pool.view(3, 0, SLOT_BYTES)[:] = b"a" * SLOT_BYTES
        pool.view(5, 0, SLOT_BYTES)[:] = b"b" * SLOT_BYTES
        async with asyncio.timeout(30):
            waiting = asyncio.create_task(ends.source.ready())
            ends.source.attached((3, 5), SLOT_BYTES)
            ends.source.rung()
            await waiting
        ends.source.arrived((3, 5), SLOT_BYTES)  # the relay says it too
        assert b"".join(map(bytes, ends.source.map(0, 2 * SLOT_BYTES))) == b"a" * SLOT_BYTES + b"b" * SLOT_BYTES
        ends.source.release()
        (said,) = ends.said
        assert isinstance(said, control.ReleaseNotice)
        assert said.consumed

    asyncio.run(run())


def test_a_source_that_failed_stays_failed_when_it_is_rung(pool: SharedPool) -> None:
    async def run() -> None:
        ends = Ends(pool)
        ends.source.attached((3, 5), SLOT_BYTES)
        ends.source.fail(PartyLost("gone").to_fault())
        ends.source.rung()
        with pytest.raises(PartyLost):
            await ends.source.ready()
        ends.source.release()
        (said,) = ends.said
        assert isinstance(said, control.ReleaseNotice)
        assert not said.consumed

    asyncio.run(run())


def test_an_attached_source_is_not_ready(pool: SharedPool) -> None:
    async def run() -> None:
        ends = Ends(pool, deadline_s=-10.0)
        ends.source.attached((3, 5), SLOT_BYTES)
        with pytest.raises(DeadlineExceeded):
            await ends.source.ready()

    asyncio.run(run())
