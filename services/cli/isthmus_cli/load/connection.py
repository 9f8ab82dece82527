"""One connection of a client that asks again and again: cheap enough not to be what is measured.

No HTTP library: httptools parses, and of a stream's events only what must be known is looked at, with one pattern for
all that came in a packet. Tokens that came in one packet share its wait.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

from isthmus_cli.load.target import Target

TOKEN = re.compile(rb'"(?:content|text|reasoning_content|reasoning)":\s*"(?!")')
"""A piece of an answer, whatever the server's way of writing JSON."""
USAGE = re.compile(rb'"usage":\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
ERROR = re.compile(rb'(?:^|\n)(?:event:\s*error|data:\s*\{\s*"error")')
DONE = b"[DONE]"
MAX_KEPT_BYTES = 64 * 1024
"""Of an answer that is an error or no stream: enough to say what it was."""

clock_s = time.perf_counter
"""uvloop's own counts whole milliseconds, which is too coarse to measure with."""


@dataclass(slots=True)
class Outcome:
    """One request. Times are `clock_s`'s."""

    asked_s: float
    first_s: float | None = None
    last_s: float | None = None
    ended_s: float = 0.0
    tokens: int = 0
    """Pieces seen; as the server counts them, once it has told its usage."""
    prompt_tokens: int = 0
    error: str | None = None
    """Its kind; None for an answer that is whole."""
    longest_gap_s: float = 0.0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, how many tokens) between one packet with tokens and the next."""


class LoadConnection(asyncio.Protocol):
    def __init__(self, *, quick_ack: bool = True) -> None:
        self._loop = asyncio.get_running_loop()
        self._quick_ack = quick_ack
        self._parser: Any = None
        self._done: asyncio.Future[None] | None = None
        self.closed = False
        self.watch: Callable[[int], None] | None = None
        """Called with the tokens of each packet that has some."""

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        inner = transport.get_extra_info("socket")
        self._socket: socket.socket | None = inner if inner is not None and inner.family != socket.AF_UNIX else None
        if self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._end("connection_reset" if exc is not None else "connection_closed")

    def data_received(self, data: bytes) -> None:
        if self._quick_ack and self._socket is not None and hasattr(socket, "TCP_QUICKACK"):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        if self._parser is None or self._done is None or self._done.done():
            return
        self._parts.clear()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
            self._end("not_http")
            return
        if self._parts and self._status == 200 and self._streams:
            self._look(b"".join(self._parts))
        elif self._parts and self._kept_bytes < MAX_KEPT_BYTES:
            self._kept += self._parts
            self._kept_bytes += sum(map(len, self._parts))
        if self._complete:
            self._finish()

    # -- httptools ----------------------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._stays = self._parser.should_keep_alive()  # a parser knows it until the message's end only

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._complete = True

    # -- asking -------------------------------------------------------------------------------------------------------

    async def ask(self, request: bytes, *, streams: bool) -> Outcome:
        """Never raises but when cancelled, which closes the connection."""
        self._parser = httptools.HttpResponseParser(self)
        self._streams, self._complete, self._status, self._stays = streams, False, 0, False
        self._parts: list[bytes] = []
        self._kept: list[bytes] = []
        self._kept_bytes, self._tail, self._told_done = 0, b"", False
        self._usage: bytes | None = None
        done = self._done = self._loop.create_future()
        self._outcome = outcome = Outcome(clock_s())
        if self.closed:
            self._end("connection_closed")
        else:
            self._transport.write(request)
        try:
            await done
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._done = None
        return outcome

    def close(self) -> None:
        self.closed = True
        self._transport.abort()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _look(self, data: bytes) -> None:
        """Whole events of a stream; what has not come to its end is kept for the next packet."""
        data = self._tail + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        cut = data.rfind(b"\n\n") + 2
        if cut < 2:
            self._tail = data
            return
        whole, self._tail = data[:cut], data[cut:]
        tokens = len(TOKEN.findall(whole))
        if tokens:
            self._count(tokens)
        if b'"usage"' in whole and (found := USAGE.findall(whole)):
            self._usage = found[-1]
        if DONE in whole:
            self._told_done = True
        if b"error" in whole and ERROR.search(whole):
            codes = [code for each in whole.split(b"\n\n") if (code := _code(each)) is not None]
            self._outcome.error = codes[0] if codes else "error_event"

    def _count(self, tokens: int) -> None:
        outcome, now_s = self._outcome, clock_s()
        if outcome.last_s is not None:
            gap_s = now_s - outcome.last_s
            outcome.gaps.append((gap_s, tokens))
            outcome.longest_gap_s = max(outcome.longest_gap_s, gap_s)
        else:
            outcome.first_s = now_s
        outcome.last_s = now_s
        outcome.tokens += tokens
        if self.watch is not None:
            self.watch(tokens)

    def _finish(self) -> None:
        outcome = self._outcome
        if self._status != 200:
            code = _code(b"".join(self._kept))
            self._end(f"http_{self._status}" + (f"_{code}" if code else ""))
            return
        if not self._streams:
            self._usage = _usage_of(b"".join(self._kept))
            outcome.first_s = outcome.last_s = clock_s()
        elif not self._told_done and outcome.error is None:
            outcome.error = "cut_short"
        if self._usage is not None:
            self._read_usage(self._usage)
        if outcome.error is None and outcome.first_s is None:
            outcome.error = "no_tokens"
        self._end(outcome.error)
        if not self._stays:
            self.close()

    def _read_usage(self, data: bytes) -> None:
        try:
            usage = json.loads(data)
        except ValueError:
            return
        for name, into in (("completion_tokens", "tokens"), ("prompt_tokens", "prompt_tokens")):
            value = usage.get(name) if isinstance(usage, dict) else None
            if type(value) is int and value >= 0:
                setattr(self._outcome, into, value)

    def _end(self, error: str | None) -> None:
        if self._done is not None and not self._done.done():
            self._outcome.error = error
            self._outcome.ended_s = clock_s()
            self._done.set_result(None)


def _code(data: bytes) -> str | None:
    """Of an OpenAI-shaped error in a body or an event."""
    start, end = data.find(b"{"), data.rfind(b"}")
    try:
        error = json.loads(data[start : end + 1]).get("error")
    except (ValueError, AttributeError):
        return None
    if not isinstance(error, dict):
        return None
    code = error.get("code") or error.get("type")
    return str(code)[:64] if code else None


def _usage_of(data: bytes) -> bytes | None:
    found = USAGE.findall(data)
    return found[-1] if found else None


async def connect(target: Target, *, quick_ack: bool = True) -> LoadConnection:
    """Raises OSError."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: LoadConnection(quick_ack=quick_ack), target.host, target.port, ssl=target.encrypted
    )
    return connection
