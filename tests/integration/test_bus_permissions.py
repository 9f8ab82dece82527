"""A server made by `server_config`: what each role may do, and what happens to whoever tries more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import trustme

from isthmus_shared.bus.login import BusLogin
from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.bus.permissions import Role, user_name
from isthmus_shared.bus.server import EmbeddedNats
from isthmus_shared.bus.server_config import BusUser, accounts
from isthmus_shared.config import ServiceConfig
from isthmus_shared.errors import BusDisconnected, BusForbidden, ConfigInvalid, NoResponders
from isthmus_shared.ids import WorkerId
from isthmus_shared.messages import subjects
from isthmus_testing.nkey_pairs import nkey_pair

WAIT_S = 10.0
INGRESS, PLANNER, RELAY, OPERATOR = "ingress.ingress", "planner", "relay.n1", "operator"
W1, W2, ALICE, BOB = "worker.w1", "worker.w2", "client.alice", "client.bob"
USERS = [
    BusUser(Role(name.partition(".")[0]), name.partition(".")[2] or None, password=f"pass-of-{name}")
    for name in (INGRESS, PLANNER, RELAY, OPERATOR, W1, W2, ALICE, BOB)
]


def users_url(server: EmbeddedNats, user: str) -> str:
    return server.url.replace("nats://", f"nats://{user}:pass-of-{user}@")


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedNats]:
    async with EmbeddedNats(settings=accounts(USERS, jetstream=True)) as running:
        yield running


@asynccontextmanager
async def logged_in(server: EmbeddedNats, *users: str) -> AsyncIterator[list[NatsBus]]:
    buses = [await NatsBus.connect(users_url(server, user), name="test") for user in users]
    try:
        yield buses
    finally:
        for bus in buses:
            await bus.close()


async def heard(bus: NatsBus, subject: str) -> bytes:
    async with asyncio.timeout(WAIT_S), bus.subscribe(subject) as found:
        return (await anext(aiter(found))).data


async def test_what_a_role_is_there_for_works(server: EmbeddedNats) -> None:
    async with (
        logged_in(server, INGRESS, PLANNER, W1) as (ingress, planner, worker),
        planner.subscribe(subjects.ROUTE, queue=subjects.PLANNER_QUEUE) as routes,
        worker.subscribe(subjects.worker_prefill(WorkerId("w1"))) as work,
        asyncio.TaskGroup() as tasks,
    ):

        async def answer(bus: NatsBus, asked: Any) -> None:
            message = await anext(aiter(asked))
            await bus.publish(message.reply, b"yes")

        tasks.create_task(answer(planner, routes))
        tasks.create_task(answer(worker, work))
        assert (await ingress.request(subjects.ROUTE, b"", timeout_s=WAIT_S)).data == b"yes"
        assert (await ingress.request(subjects.worker_prefill(WorkerId("w1")), b"", timeout_s=WAIT_S)).data == b"yes"


SPEAKS = [
    (W1, subjects.HEARTBEAT_PLANNER),
    (W1, subjects.RELAY_RATES),
    (W1, subjects.PLAN),
    (W1, subjects.worker_cancel(WorkerId("w2"))),
    (W1, subjects.API_CHAT),
    (W1, "$JS.API.STREAM.CREATE.KV_isthmus_planner"),
    (W1, "$KV.isthmus_planner.leader"),
    (PLANNER, "$JS.API.STREAM.CREATE.KV_other"),
    (PLANNER, subjects.worker_prefill(WorkerId("w1"))),
    (RELAY, subjects.HEARTBEAT_WORKER),
    (INGRESS, subjects.HEARTBEAT_WORKER),
    (INGRESS, subjects.RELAY_RATES),
    (ALICE, subjects.ROUTE),
    (ALICE, subjects.VIEW),
    (ALICE, subjects.worker_cancel(WorkerId("w1"))),
    (ALICE, subjects.worker_decode(WorkerId("w1"))),
    (ALICE, subjects.api_cancel("bob", "1")),
    (ALICE, "$SRV.STATS"),
    (ALICE, "_INBOX.client.bob.x"),
    (OPERATOR, subjects.worker_cancel(WorkerId("w1"))),
    (OPERATOR, subjects.RELAY_RATES),
]


async def test_nobody_speaks_as_somebody_else(server: EmbeddedNats) -> None:
    for user in dict.fromkeys(user for user, _ in SPEAKS):
        async with logged_in(server, user) as (bus,):
            for subject in (subject for who, subject in SPEAKS if who == user):
                with pytest.raises(BusForbidden) as refused:
                    await bus.request(subject, b"", timeout_s=WAIT_S)
                assert subject.lower() in refused.value.text.lower()
                assert user in refused.value.text
                with pytest.raises(BusForbidden):  # and from then on at once
                    await bus.publish(subject, b"")
            assert bus.connected
            assert bus.outages == 0


HEARS = [
    (W1, subjects.worker_prefill(WorkerId("w2"))),
    (W1, f"{subjects.ROOT}.>"),
    (W1, subjects.ROUTE),
    (W1, "isthmus.v1.ingress.*.*.events"),
    (W1, "_INBOX.worker.w2.>"),
    (W1, "_INBOX.>"),
    (PLANNER, subjects.API_CHAT),
    (PLANNER, "isthmus.v1.ingress.*.*.events"),
    (RELAY, subjects.worker_prefill(WorkerId("w1"))),
    (ALICE, subjects.API_CHAT),
    (ALICE, "isthmus.v1.ingress.*.*.events"),
    (ALICE, subjects.worker_prefill(WorkerId("w1"))),
    (ALICE, "_INBOX.client.bob.>"),
    (ALICE, "_INBOX.client.*.>"),
    (ALICE, "_INBOX.>"),
    (ALICE, ">"),
    (ALICE, subjects.API_CANCEL),
    (OPERATOR, "isthmus.v1.ingress.*.*.events"),
    (OPERATOR, subjects.API_CHAT),
    (OPERATOR, ">"),
]


async def test_nobody_listens_to_what_is_not_meant_for_him(server: EmbeddedNats) -> None:
    for user in dict.fromkeys(user for user, _ in HEARS):
        async with logged_in(server, user) as (bus,):
            for subject in (subject for who, subject in HEARS if who == user):
                with pytest.raises(BusForbidden) as refused:
                    await heard(bus, subject)
                assert user in refused.value.text
                assert subject in refused.value.text
            assert bus.connected
            assert bus.outages == 0


async def test_an_answer_reaches_its_asker_and_nobody_else(server: EmbeddedNats) -> None:
    """Alice cannot have Bob's answers, and one to whom she was never asked cannot answer her."""
    async with (
        logged_in(server, INGRESS, ALICE, BOB, W1) as (ingress, alice, bob, worker),
        ingress.subscribe(subjects.API_CHAT) as asked,
        asyncio.TaskGroup() as tasks,
    ):
        request = tasks.create_task(alice.request(subjects.API_CHAT, b"hello", timeout_s=WAIT_S))
        message = await anext(aiter(asked))
        assert message.reply is not None
        assert message.reply.startswith("_INBOX.client.alice.")
        for stranger in (bob, worker):
            with pytest.raises(BusForbidden):
                await stranger.request(message.reply, b"forged", timeout_s=WAIT_S)
        await ingress.publish(message.reply, b"true")
        assert (await request).data == b"true"


async def test_who_is_unknown_or_brings_a_wrong_password_is_told_so(server: EmbeddedNats) -> None:
    for url in (
        server.url,
        users_url(server, ALICE).replace("pass-of", "secret"),
        users_url(server, ALICE).replace("client.alice:", "planner:"),
    ):
        with pytest.raises(BusDisconnected, match="refuses this user") as refused:
            await NatsBus.connect(url, name="x", timeout_s=1.5)
        assert "pass-of" not in refused.value.text
        assert "secret" not in refused.value.text


async def test_what_is_forbidden_is_logged_by_name(server: EmbeddedNats) -> None:
    with structlog.testing.capture_logs() as logs:
        async with logged_in(server, W1) as (bus,):
            with pytest.raises(BusForbidden):
                await bus.request(subjects.RELAY_RATES, b"", timeout_s=WAIT_S)
    (line,) = [line for line in logs if line["event"] == "bus.forbidden"]
    assert (line["user"], line["log_level"]) == (W1, "error")
    assert subjects.RELAY_RATES in line["why"]


async def test_permissions_hold_again_after_a_restart_of_the_server(server: EmbeddedNats) -> None:
    async with logged_in(server, W1) as (bus,):
        await server.restart()
        async with asyncio.timeout(WAIT_S):
            await bus.wait_connected()
        with pytest.raises(BusForbidden):
            await bus.request(subjects.RELAY_RATES, b"", timeout_s=WAIT_S)
        with pytest.raises(NoResponders):
            await bus.request(subjects.HEARTBEAT_WORKER, b"", timeout_s=WAIT_S)


async def test_a_user_may_sign_instead_of_sending_a_password() -> None:
    (seed, public), (other, _) = nkey_pair(), nkey_pair()
    users = [BusUser(Role.WORKER, "w1", nkey=public)]
    async with EmbeddedNats(settings=accounts(users, jetstream=True)) as server:
        url = server.url.replace("nats://", f"nats://{user_name(Role.WORKER, 'w1')}@")
        async with await NatsBus.connect(url, name="x", login=BusLogin(nkey=seed)) as bus:
            assert bus.new_inbox().startswith("_INBOX.worker.w1.")
            with pytest.raises(BusForbidden):
                await bus.request(subjects.RELAY_RATES, b"", timeout_s=WAIT_S)
            await server.restart()
            async with asyncio.timeout(WAIT_S):
                await bus.wait_connected()
        with pytest.raises(BusDisconnected, match="refuses this user"):
            await NatsBus.connect(url, name="x", login=BusLogin(nkey=other), timeout_s=1.0)
        for wrong in ("SUNOTASEED", "\u20ac", public):
            with pytest.raises(ConfigInvalid, match="ISTHMUS_NATS_NKEY") as refused:
                await NatsBus.connect(url, name="x", login=BusLogin(nkey=wrong))
            assert wrong not in refused.value.text


class Pki:
    """An authority, and files of the server's and of a client's certificate."""

    def __init__(self, folder: Path, name: str) -> None:
        authority = trustme.CA()
        self.ca = folder / f"{name}-ca.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        self.cert, self.key = folder / f"{name}-cert.pem", folder / f"{name}-key.pem"
        issued = authority.issue_cert("127.0.0.1", "worker@isthmus")
        issued.private_key_pem.write_to_path(str(self.key))
        issued.cert_chain_pems[0].write_to_path(str(self.cert))

    @property
    def server(self) -> dict[str, object]:
        files = {"cert_file": str(self.cert), "key_file": str(self.key), "ca_file": str(self.ca)}
        return {"tls": {**files, "verify": True}}


async def test_over_tls_both_ends_show_who_they_are(tmp_path: Path) -> None:
    ours, foreign = Pki(tmp_path, "ours"), Pki(tmp_path, "foreign")
    async with EmbeddedNats(settings={**accounts(USERS, jetstream=False), **ours.server}) as server:
        url = users_url(server, W1).replace("nats://", "tls://")
        login = BusLogin(ca=ours.ca, cert=ours.cert, key=ours.key)
        async with await NatsBus.connect(url, name="x", login=login) as bus:
            assert bus.connected
            await server.restart()
            async with asyncio.timeout(WAIT_S):
                await bus.wait_connected()
        for refused in (
            BusLogin(ca=ours.ca),
            BusLogin(ca=ours.ca, cert=foreign.cert, key=foreign.key),
            BusLogin(ca=foreign.ca, cert=ours.cert, key=ours.key),
        ):
            with pytest.raises(BusDisconnected):
                await NatsBus.connect(url, name="x", login=refused, timeout_s=1.0)


async def test_a_password_is_never_sent_to_a_server_that_offers_no_tls(tmp_path: Path) -> None:
    """As somebody in between would, who takes the offer of TLS out of the server's greeting."""
    said = bytearray()

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","max_payload":1048576,"proto":1,"headers":true}\r\n')
        said.extend(await reader.read())
        writer.close()

    ours = Pki(tmp_path, "ours")
    async with await asyncio.start_server(plain, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        login = BusLogin(ca=ours.ca)
        with pytest.raises(BusDisconnected, match="offers no TLS"):
            await NatsBus.connect(f"tls://me:hunter2@127.0.0.1:{port}", name="x", login=login, timeout_s=1.0)
    assert b"hunter2" not in said
    assert b"CONNECT" not in said


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"ISTHMUS_NATS_URL": "nats://a:1", "ISTHMUS_NATS_CA": "ca.pem"}, "not one of TLS"),
        ({"ISTHMUS_NATS_URL": "tls://a:1", "ISTHMUS_NATS_CA": "no-such-file.pem"}, "cannot be used"),
        ({"ISTHMUS_NATS_URL": "tls://a:1", "ISTHMUS_NATS_CERT": "c.pem"}, "go together"),
        ({"ISTHMUS_NATS_URL": "nats://a:1", "ISTHMUS_NATS_NKEY": "SUhunter2"}, "no seed"),
    ],
)
async def test_what_cannot_be_used_is_told_by_the_settings_name(environ: dict[str, str], why: str) -> None:
    config = ServiceConfig.load(environ)
    with pytest.raises(ConfigInvalid, match=why) as refused:
        await NatsBus.connect(config.nats_url, name="x", login=config.bus_login)
    assert "ISTHMUS_NATS_" in refused.value.text
    assert "hunter2" not in refused.value.text + repr(config)
