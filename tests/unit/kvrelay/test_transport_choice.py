"""Which transport a relay gets, from what is set and what there is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import structlog
from structlog.testing import LogCapture

from isthmus_kvrelay.core.events import Event
from isthmus_kvrelay.transports.choice import MixedTransport, TransportKind, TransportSettings, make_transport
from isthmus_kvrelay.transports.handshake import Identity
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_kvrelay.transports.tcp import TcpSettings, TcpTransport
from isthmus_kvrelay.transports.tls import TlsSettings
from isthmus_kvrelay.transports.verbs.binding import Binding, Device
from isthmus_kvrelay.transports.verbs.transport import VerbsSettings
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.ids import Incarnation

TCP = TcpSettings(host="127.0.0.1", port=0, advertise="127.0.0.1", streams=1)
WITH_TLS = dataclasses.replace(TCP, tls=TlsSettings(cert=Path("cert"), key=Path("key"), ca=Path("ca")))


class Devices:
    name, version = "fake", "1"

    def __init__(self, *names: str) -> None:
        self._names = list(names)

    def devices(self) -> list[str]:
        return self._names

    def open(self, device: str) -> Device:
        raise FileNotFoundError(device)


def nothing() -> Binding:
    raise ConfigInvalid("no RDMA verbs library can be loaded")


async def choose(settings: TransportSettings) -> tuple[TcpTransport | MixedTransport, LogCapture]:
    seen = LogCapture()
    log = structlog.wrap_logger(structlog.PrintLogger(), processors=[seen])
    pool = SharedPool.create(pool_bytes=8192, slot_bytes=4096)

    def emit(event: Event) -> None:
        raise AssertionError(event)

    try:
        me = Identity(Incarnation("me"), b"a secret only for tests")
        return make_transport(settings, me=me, pool=pool, emit=emit, log=log), seen
    finally:
        pool.close()


async def test_auto_without_a_library_or_a_device_is_tcp_and_says_why() -> None:
    for load, why in ((nothing, "no RDMA verbs library"), (lambda: Devices(), "no RDMA device")):
        chosen, seen = await choose(TransportSettings(TCP, kind=TransportKind.AUTO, load=load))
        assert isinstance(chosen, TcpTransport)
        (entry,) = seen.entries
        assert entry["event"] == "relay.without_verbs"
        assert why in entry["why"]


async def test_auto_takes_every_device_there_is() -> None:
    chosen, seen = await choose(TransportSettings(TCP, kind=TransportKind.AUTO, load=lambda: Devices("b", "a")))
    assert isinstance(chosen, MixedTransport)
    assert seen.entries[0]["devices"] == ["a", "b"]


@pytest.mark.parametrize(
    ("kind", "devices"), [(TransportKind.VERBS, ()), (TransportKind.VERBS, ("a",)), (TransportKind.AUTO, ("a",))]
)
async def test_what_was_asked_for_by_name_and_cannot_be_had_is_fatal(
    kind: TransportKind, devices: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigInvalid, match="library"):
        await choose(TransportSettings(TCP, kind=kind, verbs=VerbsSettings(devices=devices), load=nothing))


async def test_tcp_does_not_even_look_for_a_library() -> None:
    def must_not() -> Binding:
        raise AssertionError

    chosen, _ = await choose(TransportSettings(TCP, kind=TransportKind.TCP, load=must_not))
    assert isinstance(chosen, TcpTransport)


async def test_who_asks_for_tls_never_gets_a_lane_that_is_in_the_clear() -> None:
    settings = TransportSettings(WITH_TLS, kind=TransportKind.VERBS, load=lambda: Devices("a"))
    with pytest.raises(ConfigInvalid, match="cannot be encrypted"):
        await choose(settings)
    with pytest.raises(ConfigInvalid, match="TLS files"):  # auto goes on to TCP, which reads the files
        await choose(dataclasses.replace(settings, kind=TransportKind.AUTO))
