"""The HTTP door with a certificate: HTTPS alone, and what is wrong with the files told before anything begins."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import trustme
import uvloop

from isthmus_ingress.config import IngressConfig
from isthmus_ingress.http_exchange import Receive, Scope, Send
from isthmus_ingress.http_server import ApiServer, listen
from isthmus_ingress.tls import server_context
from isthmus_shared.errors import ConfigInvalid
from isthmus_testing.fake_cluster import say
from isthmus_testing.ingress import ingress_stack

WAIT_S = 20.0
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def pems(authority: trustme.CA, tmp_path: Path) -> tuple[Path, Path]:
    """Certificate and key for 127.0.0.1."""
    issued = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return cert, key


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def test_an_answer_streams_over_https_and_nothing_is_said_in_the_clear(
    folder: Path, authority: trustme.CA, pems: tuple[Path, Path]
) -> None:
    settings = {"tls_cert": pems[0], "tls_key": pems[1]}
    async with (
        ingress_stack(folder, "ok", settings=settings, tokens=say("ok")) as (ingress, _cluster, _broker),
        httpx.AsyncClient(base_url=f"https://{ingress.address}", verify=trusting(authority), timeout=WAIT_S) as http,
    ):
        for _ in range(2):  # the second over the same connection
            answer = await http.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200
            assert answer.text.count('"content"') > 1
            assert answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.RemoteProtocolError):
            await httpx.AsyncClient(timeout=WAIT_S).get(f"http://{ingress.address}/health")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await httpx.AsyncClient(timeout=WAIT_S).get(f"https://{ingress.address}/health")
        assert (await http.get("/health")).status_code == 200, "others' failures end nobody's connection"


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_who_never_shakes_hands_is_cut_off_and_who_does_is_served(
    loop: Callable[[], asyncio.AbstractEventLoop], authority: trustme.CA, pems: tuple[Path, Path]
) -> None:
    schemes: list[str] = []

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        schemes.append(scope["scheme"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def main() -> None:
        with listen("127.0.0.1", 0) as listener:
            host, port = listener.getsockname()
            server = ApiServer(app, grace_s=WAIT_S, head_timeout_s=0.5, tls=server_context(*pems))
            async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
                tasks.create_task(server.serve(sockets=[listener]))
                silent, silent_end = await asyncio.open_connection(host, port)
                reader, writer = await asyncio.open_connection(host, port, ssl=trusting(authority))
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK")
                assert await silent.read() == b""
                for each in (writer, silent_end):
                    each.close()
                server.stop()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
    assert schemes == ["https"]


def test_a_certificate_that_cannot_be_used_is_named(pems: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = pems
    nothing, noise = tmp_path / "nothing.pem", tmp_path / "noise.pem"
    noise.write_text("noise")
    other = tmp_path / "other.pem"
    other.write_bytes(trustme.CA().issue_cert("x").private_key_pem.bytes())
    for pair, said in (((nothing, key), "nothing.pem"), ((cert, nothing), "nothing.pem"), ((noise, key), "PEM")):
        with pytest.raises(ConfigInvalid, match=said) as found:
            server_context(*pair)
        assert found.value.param == "ISTHMUS_INGRESS_TLS_CERT"
    with pytest.raises(ConfigInvalid, match="KEY_VALUES_MISMATCH"):
        server_context(cert, other)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric import ec

    secret = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"secret")
    )
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(trustme.CA().issue_cert("x").cert_chain_pems[0].bytes())
    key.write_bytes(secret)
    with pytest.raises(ConfigInvalid, match="encrypted"):
        server_context(cert, key)


@pytest.mark.parametrize("given", ["TLS_CERT", "TLS_KEY"])
def test_certificate_and_key_go_together(given: str) -> None:
    with pytest.raises(ConfigInvalid, match="set both, or neither"):
        IngressConfig.load({"ISTHMUS_INGRESS_MODEL": "m", f"ISTHMUS_INGRESS_{given}": "x.pem"})
