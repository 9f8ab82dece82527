"""Lanes over mutual TLS: what moves, who gets in, and that nothing is to be read on the wire."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import trustme

from isthmus_kvrelay.transports.tls import Tls, TlsSettings
from isthmus_shared.errors import ConfigInvalid, IsthmusError, PartyLost, Retry
from isthmus_testing import eventually
from isthmus_testing.relay import (
    G1,
    SLOT_BYTES,
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
from isthmus_testing.tcp_proxy import proxy_to

SIZE = 24 * SLOT_BYTES


def files(folder: Path, name: str, issuer: trustme.CA, trusted: trustme.CA) -> TlsSettings:
    """A certificate of `issuer`, that trusts those of `trusted`."""
    folder.mkdir(exist_ok=True)
    made = issuer.issue_cert(f"{name}.relay.test")
    settings = TlsSettings(folder / f"{name}.pem", folder / f"{name}.key", folder / f"{name}-ca.pem")
    made.private_key_pem.write_to_path(settings.key)
    settings.cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    trusted.cert_pem.write_to_path(settings.ca)
    return settings


async def test_transfers_go_both_ways_at_once_and_nobody_reads_them_on_the_wire(tmp_path: Path) -> None:
    authority = trustme.CA()
    tls = [files(tmp_path / "tls", name, authority, authority) for name in ("a", "b")]
    seen = bytearray()

    def look(data: bytes) -> bytes:
        seen.extend(data)
        return data

    async with (
        running(daemon_settings(tmp_path, "a", total_slots=256, tcp={"tls": tls[0]})) as a,
        running(daemon_settings(tmp_path, "b", total_slots=256, tcp={"tls": tls[1]})) as b,
        client_of(a) as at_a,
        client_of(b) as at_b,
        proxy_to(a.ref.address) as proxy,
    ):
        proxy.damage = look
        here, there = new_transfer(), new_transfer()
        outbound = await at_a.open_sink(here, G1, manifest_of(SIZE), deadline_s=30, wait_s=1)
        inbound = await at_b.open_sink(there, G1, manifest_of(SIZE), deadline_s=30, wait_s=1)
        ticket = ticket_for(a.advertised_as(proxy.address), here, SIZE)
        to_b = await at_b.open_source(ticket, deadline_s=30)
        await eventually(lambda: a.daemon.stats().lanes == b.daemon.stats().lanes == 1)
        to_a = await at_a.open_source(ticket_for(b.ref, there, SIZE), deadline_s=30)
        write(outbound, pattern(SIZE, 1))
        write(inbound, pattern(SIZE, 2))
        outbound.seal()
        inbound.seal()
        async with asyncio.timeout(20):
            await to_b.ready()
            await to_a.ready()
        assert read(to_b) == pattern(SIZE, 1)
        assert read(to_a) == pattern(SIZE, 2)
        to_a.release()
        to_b.release()
        await eventually(lambda: a.at_rest() and b.at_rest())
    assert len(seen) > SIZE
    assert pattern(SIZE, 1)[:64] not in bytes(seen)
    assert here.encode() not in bytes(seen)


@pytest.mark.parametrize("case", ["stranger dials", "stranger answers", "plain dials", "plain answers"])
async def test_without_a_certificate_of_the_authority_there_is_no_lane(tmp_path: Path, case: str) -> None:
    authority, other = trustme.CA(), trustme.CA()
    good = files(tmp_path / "tls", "good", authority, authority)
    bad = None if "plain" in case else files(tmp_path / "tls", "bad", other, authority)
    at_a, at_b = (good, bad) if "dials" in case else (bad, good)
    quick = {"handshake_timeout_s": 1.0, "ping_interval_s": 0.1, "ping_timeout_s": 1.0}
    async with (
        running(daemon_settings(tmp_path, "a", tcp={"tls": at_a, **quick})) as a,
        running(daemon_settings(tmp_path, "b", tcp={"tls": at_b, **quick})) as b,
        client_of(a) as producer,
        client_of(b) as consumer,
    ):
        transfer = new_transfer()
        sink = await producer.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=30, wait_s=1)
        write(sink, pattern(SIZE))
        source = await consumer.open_source(ticket_for(a.ref, transfer, SIZE), deadline_s=30)
        async with asyncio.timeout(10):
            with pytest.raises(IsthmusError) as caught:
                await source.ready()
        assert caught.value.retry is Retry.ELSEWHERE
        source.release()
        sink.abort(PartyLost("x").to_fault())
        await eventually(lambda: a.daemon.stats().lanes == b.daemon.stats().lanes == 0)
        await eventually(lambda: a.at_rest() and b.at_rest())


def test_a_file_that_is_no_certificate_is_a_setting_at_fault(tmp_path: Path) -> None:
    authority = trustme.CA()
    settings = files(tmp_path, "a", authority, authority)
    settings.key.write_text("no key")
    with pytest.raises(ConfigInvalid, match="TLS files"):
        Tls(settings)
