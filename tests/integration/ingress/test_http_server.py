"""The HTTP server by itself: what a connection's bytes become, whatever their packets, and how it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import h11
import pytest

from isthmus_ingress.http_connection import MAX_PIPELINED
from isthmus_ingress.http_exchange import MAX_UNREAD_BODY_BYTES, WIRE, HttpExchange, Receive, Scope, Send
from isthmus_ingress.http_server import ApiServer, listen
from isthmus_shared.errors import ConfigInvalid

WAIT_S = 20.0
Connect = Callable[[], "asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]"]


class App:
    """Tells what it was asked, by path; `/wait` answers once `go` is set."""

    def __init__(self) -> None:
        self.go, self.waiting = asyncio.Event(), asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["path"]:
            case "/bug":
                raise ZeroDivisionError("a bug")
            case "/half":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"half", "more_body": True})
                return
            case "/stream":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                for part in (b"one ", b"", b"two"):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
                return
            case "/early":  # the body is not wanted
                await self.answer(send, 413, {})
                return
            case "/wait":
                self.waiting.set()
                exchange: HttpExchange = scope[WIRE]
                exchange.on_gone = self.left.set
                await self.go.wait()
        size = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message["body"])
            more = message["more_body"]
        told = {"method": scope["method"], "path": scope["path"], "query": scope["query_string"].decode(), "body": size}
        await self.answer(send, 200, told)

    @staticmethod
    async def answer(send: Send, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(**limits: float) -> AsyncIterator[tuple[App, ApiServer, Connect]]:
    with listen("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()
        app = App()
        server = ApiServer(app, grace_s=WAIT_S, **limits)
        writers: list[asyncio.StreamWriter] = []

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(host, port)
            writers.append(writer)
            return reader, writer

        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve(sockets=[listener]))
            try:
                yield app, server, connect  # type: ignore[misc]
            finally:
                for writer in writers:
                    writer.close()
                app.go.set()
                server.stop()


class Answers:
    """Parsed by h11, which forgives nothing."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._parser = h11.Connection(h11.CLIENT)

    async def next(self, method: bytes = b"GET") -> tuple[int, dict[bytes, bytes], bytes]:
        if self._parser.our_state is not h11.IDLE:
            self._parser.start_next_cycle()
        self._parser.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        self._parser.send(h11.EndOfMessage())
        status, headers, body = 0, {}, b""
        while True:
            event = self._parser.next_event()
            if event is h11.NEED_DATA:
                self._parser.receive_data(await self._reader.read(65536))
            elif isinstance(event, h11.Response):
                status, headers = event.status_code, dict(event.headers)
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                return status, headers, body


def request(path: str, body: bytes = b"", *, method: str = "POST", more: str = "", version: str = "1.1") -> bytes:
    length = f"content-length: {len(body)}\r\n" if body or method == "POST" else ""
    return f"{method} {path} HTTP/{version}\r\nhost: x\r\n{length}{more}\r\n".encode() + body


async def test_requests_are_answered_one_after_the_other_however_their_bytes_come() -> None:
    sent = request("/a?x=1", b"abc") + request("/b%20c", method="GET") + request("/stream") + request("/d", b"x" * 9)
    chunked = b"POST /e HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    sent += chunked
    async with serving() as (_, _server, connect):
        for size in (1, 7, len(sent)):
            reader, writer = await connect()
            for at in range(0, len(sent), size):
                writer.write(sent[at : at + size])
                await writer.drain()
            answers = Answers(reader)
            told = [(await answers.next())[2] for _ in range(5)]
            assert json.loads(told[0]) == {"method": "POST", "path": "/a", "query": "x=1", "body": 3}
            assert json.loads(told[1])["path"] == "/b c"
            assert told[2] == b"one two"
            assert [json.loads(one)["body"] for one in told[3:]] == [9, 5]


async def test_a_body_larger_than_what_is_held_is_read_as_it_is_taken() -> None:
    async with serving() as (app, _server, connect):
        reader, writer = await connect()
        size = 64 * MAX_UNREAD_BODY_BYTES
        writer.write(request("/wait", b"x" * size))
        await app.waiting.wait()
        app.go.set()
        assert json.loads((await Answers(reader).next())[2])["body"] == size


async def test_a_client_that_waits_for_the_word_gets_it() -> None:
    async with serving() as (_, _server, connect):
        reader, writer = await connect()
        writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert json.loads((await Answers(reader).next())[2])["body"] == 3


async def test_the_rest_of_an_unwanted_body_is_thrown_away_and_the_connection_stays() -> None:
    async with serving() as (_, _server, connect):
        reader, writer = await connect()
        answers = Answers(reader)
        whole = request("/early", b"x" * 300_000)
        writer.write(whole[:1000])
        assert (await answers.next())[0] == 413
        writer.write(whole[1000:] + request("/a", b"ab"))
        assert json.loads((await answers.next())[2])["body"] == 2


@pytest.mark.parametrize(
    ("sent", "stays"),
    [
        (request("/a", method="GET"), True),
        (request("/a", method="GET", more="connection: close\r\n"), False),
        (request("/a", method="GET", version="1.0"), False),
        (request("/stream", method="GET", version="1.0"), False),
        (request("/a", method="GET", more="connection: upgrade\r\nupgrade: websocket\r\n"), False),
        (request("/bug"), False),
    ],
)
async def test_a_connection_stays_unless_somebody_wants_its_end(sent: bytes, stays: bool) -> None:
    async with serving() as (_, _server, connect):
        reader, writer = await connect()
        writer.write(sent)
        if stays:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            names = [line.partition(b":")[0] for line in head.split(b"\r\n")[1:] if line]
            assert len(set(names)) == len(names), "each header once"
            await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
            writer.write(sent + request("/last", method="GET", more="connection: close\r\n"))
            assert b"/last" in await reader.read()
        else:
            head, _, _ = (await reader.read()).partition(b"\r\n\r\n")
            assert b"connection: close" in head
            assert (b" 500 " in head) == (b"/bug" in sent)
            assert b"transfer-encoding" not in head


async def test_head_has_a_length_and_no_body() -> None:
    async with serving() as (_, _server, connect):
        reader, writer = await connect()
        writer.write(request("/a", method="HEAD") + request("/b", method="GET"))
        answers = Answers(reader)
        status, headers, body = await answers.next(b"HEAD")
        assert (status, body) == (200, b"")
        assert int(headers[b"content-length"]) > 0
        assert headers[b"date"].endswith(b" GMT")
        assert json.loads((await answers.next())[2])["path"] == "/b"


async def test_an_answer_left_undone_ends_its_connection_so_that_nobody_takes_it_for_whole() -> None:
    async with serving() as (_, _server, connect):
        reader, writer = await connect()
        writer.write(request("/half"))
        with pytest.raises((ConnectionError, h11.RemoteProtocolError)):
            await Answers(reader).next()


async def test_a_client_that_leaves_is_told_of_at_once() -> None:
    async with serving() as (app, server, connect):
        _, writer = await connect()
        writer.write(request("/wait"))
        await app.waiting.wait()
        writer.close()
        await app.left.wait()
        assert not server.connections


async def test_more_requests_ahead_than_anyone_sends_end_the_connection() -> None:
    async with serving() as (app, _server, connect):
        reader, writer = await connect()
        writer.write(request("/wait"))
        await app.waiting.wait()
        writer.write(request("/a", method="GET") * (MAX_PIPELINED + 1))
        assert b" 400 " in await reader.readline()


async def test_idle_connections_end() -> None:
    async with serving(keep_alive_s=0.1) as (_, server, connect):
        reader, writer = await connect()
        writer.write(request("/a"))
        assert (await Answers(reader).next())[0] == 200
        assert await reader.read() == b""
        assert not server.connections


async def test_told_to_stop_it_ends_what_is_idle_and_lets_finish_what_is_not() -> None:
    async with serving() as (app, server, connect):
        idle, idler = await connect()
        idler.write(request("/a"))
        assert (await Answers(idle).next())[0] == 200
        busy, writer = await connect()
        writer.write(request("/wait"))
        await app.waiting.wait()
        server.stop()
        assert await idle.read() == b""
        app.go.set()
        assert b"connection: close" in await busy.read()
        with pytest.raises(ConnectionError):
            await connect()


async def test_two_servers_may_share_a_port_and_others_may_not_take_it() -> None:
    with listen("127.0.0.1", 0, shared=True) as one:
        host, port = one.getsockname()
        with listen(host, port, shared=True) as two:
            assert two.getsockname() == one.getsockname()
        with pytest.raises(ConfigInvalid, match="cannot listen"):
            listen(host, port)
