"""A staged transfer goes to another destination without its producer, be the first one dead or alive."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from isthmus_shared.errors import StaleParty
from isthmus_shared.messages.work import KvTicket
from isthmus_testing import eventually
from isthmus_testing.relay import (
    G1,
    SLOT_BYTES,
    Node,
    client_of,
    daemon_settings,
    manifest_of,
    new_transfer,
    pattern,
    read,
    running,
    ticket_for,
    write,
)

SIZE = 5 * SLOT_BYTES - 400


async def staged(home: Node) -> KvTicket:
    """A sealed transfer whose producer has gone."""
    transfer = new_transfer()
    async with client_of(home) as producer:
        sink = await producer.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=30, wait_s=5)
        write(sink, pattern(SIZE))
        sink.seal()
    return ticket_for(home.ref, transfer, SIZE)


async def test_a_delivered_transfer_can_be_fetched_again_by_another_node(tmp_path: Path) -> None:
    names = [daemon_settings(tmp_path, name, total_slots=64) for name in "abc"]
    async with asyncio.timeout(30), running(names[0]) as home, running(names[1]) as b, running(names[2]) as c:
        ticket = await staged(home)
        async with client_of(b) as first:
            source = await first.open_source(ticket, deadline_s=30)
            await source.ready()
            source.release()
            await eventually(lambda: not home.daemon.stats().flows_out)
        async with client_of(c) as second:
            again = await second.open_source(ticket.model_copy(update={"pull": 2}), deadline_s=30)
            await again.ready()
            assert read(again) == pattern(SIZE)
            again.release()
        await eventually(lambda: all(node.at_rest() for node in (home, b, c)))
        assert home.daemon.stats().revivals == 1


async def test_another_destination_takes_a_transfer_from_one_that_has_it(tmp_path: Path) -> None:
    names = [daemon_settings(tmp_path, name, total_slots=64) for name in "abc"]
    async with asyncio.timeout(30), running(names[0]) as home, running(names[1]) as b, running(names[2]) as c:
        ticket = await staged(home)
        async with client_of(b) as first, client_of(c) as second:
            old = await first.open_source(ticket, deadline_s=30)
            await old.ready()
            new = await second.open_source(ticket.model_copy(update={"pull": 2}), deadline_s=30)
            await new.ready()
            assert read(new) == pattern(SIZE)
            await eventually(lambda: b.closed)
            with pytest.raises(StaleParty):
                await old.ready()
            old.release()
            new.release()
        await eventually(lambda: all(node.at_rest() for node in (home, b, c)))
