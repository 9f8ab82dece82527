"""`isthmus bench load` against servers that say every kind of thing."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from isthmus_cli.exits import Exit
from isthmus_cli.load.connection import LoadConnection, Outcome, connect
from isthmus_cli.load.histogram import Histogram
from isthmus_cli.load.plan import Arrival, Asking, Shape, constant, poisson, replayed
from isthmus_cli.load.report import Report, Targets
from isthmus_cli.load.runner import Load
from isthmus_cli.load.target import Target, parse_target
from isthmus_cli.main import app
from isthmus_shared.errors import ConfigInvalid

WAIT_S = 20.0
SHAPE = Shape(words=3, output_tokens=4)


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def delta(text: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}}], "usage": None}


USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4, "prompt_tokens_details": {"cached": 0}}}
EVENTS = [delta(""), delta("a"), delta('"content": "b"'), delta("c"), delta("d"), USAGE]
STREAM = b"".join(map(event, EVENTS)) + b"data: [DONE]\n\n"


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def answer(body: bytes, *, status: str = "200 OK", size: int = 50, more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: text/event-stream\r\n{more}transfer-encoding: chunked\r\n\r\n"
    return head.encode() + chunked(body, size)


@asynccontextmanager
async def server(answers: Sequence[bytes], *, packet: int = 10**9) -> AsyncIterator[Target]:
    """Answers each request with the next of them, in packets; after an empty one it hangs up."""
    waiting = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while waiting:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
                data = waiting.pop(0)
                for at in range(0, len(data), packet):
                    writer.write(data[at : at + packet])
                    await writer.drain()
                if not data or b"connection: close" in data:
                    return
        except asyncio.IncompleteReadError:
            return  # the client has gone
        finally:
            writer.close()

    async with asyncio.timeout(WAIT_S), await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        yield parse_target(f"http://127.0.0.1:{port}/v1")


async def ask(target: Target, *, streams: bool = True) -> tuple[LoadConnection, Outcome]:
    connection = await connect(target)
    outcome = await connection.ask(target.request("/chat/completions", b"{}"), streams=streams)
    return connection, outcome


@pytest.mark.parametrize("packet", [1, 7, 64, 10**9])
@pytest.mark.parametrize("crlf", [False, True])
async def test_tokens_are_counted_however_a_stream_is_cut(packet: int, crlf: bool) -> None:
    body = STREAM.replace(b"\n", b"\r\n") if crlf else STREAM
    async with server([answer(body)] * 2, packet=packet) as target:
        connection, first = await ask(target)
        seen: list[int] = []
        connection.watch = seen.append
        second = await connection.ask(target.request("/chat/completions", b"{}"), streams=True)
        for outcome in (first, second):
            assert (outcome.error, outcome.tokens, outcome.prompt_tokens) == (None, 4, 5)
            assert outcome.first_s is not None
            assert outcome.asked_s <= outcome.first_s <= (outcome.last_s or 0) <= outcome.ended_s
        assert sum(seen) == 4
        assert sum(tokens for _, tokens in second.gaps) == 4 - seen[0], "of the first packet's nothing was waited for"
        connection.close()


FAILURES = {
    "cut_short": answer(b"".join(map(event, EVENTS))),
    "no_tokens": answer(event(delta("")) + b"data: [DONE]\n\n"),
    "party_lost": answer(event(delta("a")) + b"event: error\n" + event({"error": {"code": "party_lost"}})),
    "http_503_no_capacity": answer(b'{"error": {"message": "m", "code": "no_capacity"}}', status="503 Busy"),
    "http_500": answer(b"oops", status="500 Oops"),
    "not_http": b"what?\r\n\r\n",
    "connection_closed": b"",
}


@pytest.mark.parametrize("kind", FAILURES)
async def test_what_goes_wrong_is_told_by_its_kind(kind: str) -> None:
    async with server([FAILURES[kind]], packet=64) as target:
        connection, outcome = await ask(target)
        assert outcome.error == kind
        connection.close()


async def test_an_answer_that_is_no_stream_is_read_by_its_usage() -> None:
    body = json.dumps({"choices": [{"message": {"content": "abc"}}], "usage": USAGE["usage"]}).encode()
    async with server([answer(body)]) as target:
        connection, outcome = await ask(target, streams=False)
        assert (outcome.error, outcome.tokens, outcome.prompt_tokens, outcome.gaps) == (None, 4, 5, [])
        connection.close()


async def test_a_closed_loop_goes_on_over_lost_connections_and_an_open_one_over_refusals() -> None:
    outcomes: list[Outcome] = []
    ways = [answer(STREAM), b"", answer(STREAM, more="connection: close\r\n"), answer(STREAM)] + [answer(STREAM)] * 500
    async with server(ways) as target:
        load = Load(target, Asking("m"), outcomes.append, timeout_s=5, seed=1)
        while len(outcomes) < 4:
            await load.closed_loop(2, 0.05, SHAPE)
    kinds = [outcome.error for outcome in outcomes]
    assert set(kinds) == {"connection_closed", None}
    assert kinds.count(None) >= 3, "it goes on"
    outcomes.clear()
    load = Load(target, Asking("m"), outcomes.append, timeout_s=5, seed=1)
    await load.open_loop([Arrival(0.0, SHAPE), Arrival(0.01, SHAPE)])
    assert [outcome.error for outcome in outcomes] == ["connection_refused"] * 2
    assert load.open == 0


async def test_an_open_loop_counts_from_when_a_request_was_due() -> None:
    outcomes: list[Outcome] = []
    async with server([answer(STREAM)] * 2) as target:
        load = Load(target, Asking("m"), outcomes.append, timeout_s=5, seed=1)
        await load.open_loop(Arrival(at_s, SHAPE) for at_s in (0.0, 0.05))
    first, second = sorted(outcomes, key=lambda outcome: outcome.asked_s)
    assert second.asked_s - first.asked_s == pytest.approx(0.05, abs=1e-6)


async def test_an_answer_that_does_not_come_is_given_up() -> None:
    outcomes: list[Outcome] = []
    async with server([answer(STREAM)[:200], b"never"]) as target:
        load = Load(target, Asking("m"), outcomes.append, timeout_s=0.1, seed=1)
        await load.open_loop([Arrival(0.0, SHAPE)])
    assert [outcome.error for outcome in outcomes] == ["timeout"]


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=60), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_within_one_in_a_hundred_of_the_values(values: list[float], share: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    exact = sorted(values)[max(1, math.ceil(share * len(values) - 1e-9)) - 1]
    found = histogram.quantile(share)
    assert found is not None
    assert abs(found - exact) <= max(1e-6, exact / 100)
    assert histogram.mean_s == pytest.approx(statistics.fmean(values))
    assert sum(count for _, count in histogram.buckets()) == len(values)
    assert Histogram().add([histogram, histogram]).quantile(share) == found


def test_goodput_counts_what_met_both_targets() -> None:
    report = Report(Targets(ttft_s=0.5, itl_s=0.11), from_s=10.0, until_s=20.0)
    good = Outcome(11.0, first_s=11.4, last_s=11.8, ended_s=11.9, tokens=5, gaps=[(0.4, 4)])
    late = Outcome(11.0, first_s=11.6, last_s=11.8, ended_s=11.9, tokens=5)
    slow = Outcome(11.0, first_s=11.4, last_s=12.8, ended_s=12.9, tokens=5)
    failed = Outcome(11.0, first_s=11.1, last_s=11.2, ended_s=12.0, tokens=2, error="cut_short")
    outside = Outcome(9.0, first_s=9.1, last_s=9.2, ended_s=9.9, tokens=5)
    for outcome in (good, late, slow, failed, outside):
        report.take(outcome)
    told = report.as_json(url="u", load="l")
    assert (told["requests"], told["answered"], told["good_requests"]) == (4, 3, 1)
    assert told["errors"] == {"cut_short": 1}
    assert told["goodput_requests_per_s"] == 0.1
    assert told["itl_s"]["count"] == 4
    assert told["itl_s"]["p50"] == pytest.approx(0.1, rel=0.01)
    assert "within the targets: 1 (25.0%)" in report.as_text()


def test_arrivals_have_their_rate_and_a_trace_its_times() -> None:
    gaps = [arrival.at_s for arrival in poisson(100, 50, SHAPE, Random(1))]
    assert len(gaps) == pytest.approx(5000, rel=0.05)
    assert [arrival.at_s for arrival in constant(4, 1, SHAPE)] == [0, 0.25, 0.5, 0.75]
    trace = [(0.0, 100, 5), (4.0, 1, 6), (9.0, 50, 7)]
    found = list(replayed(trace, speed=2, seconds=3, tokens_per_word=2.0))
    assert found == [Arrival(0.0, Shape(50, 5)), Arrival(2.0, Shape(1, 6))]


async def test_a_trace_that_is_none_is_told_in_one_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"\x00\xa1 no trace")
    async with server([answer(STREAM)] * 4) as target:
        arguments = ["bench", "load", f"http://{target.host}:{target.port}/v1", "--model", "m", "--trace", str(trace)]
        done = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert done.exit_code == Exit.INVALID
    (line,) = done.stderr.splitlines()
    assert f"{trace} is no mooncake trace" in line


@pytest.mark.parametrize(("option", "why"), [("--trace", "no such file"), ("--out", "folder"), ("--plot", "folder")])
def test_a_place_that_is_not_there_is_told_before_the_load(tmp_path: Path, option: str, why: str) -> None:
    load = [] if option == "--trace" else ["--clients", "1"]
    arguments = ["bench", "load", "http://127.0.0.1:1/v1", *load, option, str(tmp_path / "none" / "x.png")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == Exit.INVALID
    assert why in done.stderr


def test_requests_are_what_was_asked_for() -> None:
    chat = json.loads(Asking("m").body(Shape(2, 9), Random(1)))
    assert (chat["model"], chat["max_tokens"], chat["stream"], chat["ignore_eos"]) == ("m", 9, True, True)
    assert len(chat["messages"][0]["content"].split()) == 2
    plain = json.loads(Asking(None, chat=False, stream=False, ignore_eos=False).body(Shape(2, 9), Random(1)))
    assert set(plain) == {"prompt", "max_tokens", "temperature"}


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://[::1"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigInvalid):
        parse_target(url)


def test_a_url_is_taken_apart() -> None:
    target = parse_target("https://[::1]:9/api/", api_key="k")
    assert (target.host, target.port, target.path, target.encrypted is not None) == ("::1", 9, "/api", True)
    request = target.request("/completions", b"{}")
    assert request.startswith(b"POST /api/completions HTTP/1.1\r\nhost: [::1]:9\r\n")
    assert b"authorization: Bearer k\r\n" in request
    assert parse_target("http://x").path == "/v1"
    with pytest.raises(ConfigInvalid):
        parse_target("http://x", api_key="a\nb")


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra `bench`)")
    from isthmus_cli.load import plot

    report = Report(Targets(), from_s=0.0)
    report.take(Outcome(1.0, first_s=1.1, last_s=1.5, ended_s=2.0, tokens=3, gaps=[(0.2, 1), (0.2, 1)]))
    for name in ("load.svg", "load.png"):
        plot.draw(report, tmp_path / name, "a title")
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(ConfigInvalid):
        plot.draw(report, tmp_path / "load.wibble", "a title")
