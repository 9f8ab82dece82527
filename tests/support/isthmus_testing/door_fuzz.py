"""Hostile bytes for everything of Isthmus that reads what others wrote, but the relay (`relay_fuzz`).

    python -m isthmus_testing.door_fuzz --seconds 600

Targets: every message of the bus; step events as they are read quickly, against the slow reader; the file of tenants;
HTTP as bytes on a connection, bodies of every endpoint, and requests at the bus' door, these three against a whole
ingress with a scripted cluster behind it. Inputs are well-formed ones, bent, from a seed that a finding prints.

A finding is an exception that is no typed error, an answer of 500, one that does not come, a request that is left
behind, or memory that grows after a quarter of the time by over `MAX_GROWTH_BYTES`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import structlog

from isthmus_ingress.openai.openapi import document
from isthmus_ingress.service import Ingress
from isthmus_ingress.tenants import parse_tenants
from isthmus_shared.bus.port import Bus
from isthmus_shared.errors import ConfigInvalid, ProtocolViolation
from isthmus_shared.messages import subjects
from isthmus_shared.messages.base import VERSION
from isthmus_shared.messages.catalog import all_messages
from isthmus_shared.messages.quick import read_steps
from isthmus_shared.messages.work import StepEvents
from isthmus_testing.fake_cluster import FakeCluster
from isthmus_testing.ingress import ingress_stack, write_text_folder
from isthmus_testing.memory import resident_bytes
from isthmus_testing.schema_values import bent, mangled, value
from isthmus_testing.waiting import eventually

ANSWER_S = 20.0
"""For an answer to come; a scripted cluster gives one in milliseconds."""
MAX_GROWTH_BYTES = 48 << 20
"""Of a process of some 150 MiB: the allocator's own fragments, after bodies of every size."""
WARM_UP = 0.25
MESSAGES = all_messages()
SCHEMAS = {kind: message.model_json_schema() for kind, message in MESSAGES.items()}
TENANT = {"name": "acme", "key": ["sk-0123456789abcdef"], "requests_per_min": 6, "slo_class": "x", "cache_salt": "y"}
POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
HTTP_WORDS = (
    *(b"\r\n", b"\n", b"\0", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n"),
    *(b"Connection: close\r\n", b"Upgrade: h2c\r\n", b": \r\n", b"%00%2e%2e/", b"HTTP/0.9", b"0\r\n\r\n", b"\xff"),
)


def message_bytes(random: Random) -> tuple[str, bytes]:
    kind = random.choice(list(SCHEMAS))
    fields = value(random, SCHEMAS[kind], SCHEMAS[kind])
    tree = {"kind": kind, "v": VERSION, **fields} if isinstance(fields, dict) else fields
    for _ in range(random.choice((0, 1, 1, 2))):
        tree = bent(random, tree)
    return kind, _mangled(random, msgpack.packb(tree))


def bus_message(random: Random) -> str:
    kind, data = message_bytes(random)
    try:
        found = MESSAGES[kind].decode(data)
    except ProtocolViolation:
        return "refused"
    assert MESSAGES[kind].decode(found.encode()) is not None
    return "read"


def quick_steps(random: Random) -> str:
    """What the quick reader takes, the other reads as the same."""
    schema = SCHEMAS[StepEvents.KIND]
    fields = value(random, schema, schema)
    tree: Any = {"kind": StepEvents.KIND, "v": VERSION, **(fields if isinstance(fields, dict) else {})}
    data = _mangled(random, msgpack.packb(tree if random.random() < 0.5 else bent(random, tree)))
    quick = read_steps(data)
    if quick is None:
        return "refused"
    slow = StepEvents.decode(data)
    assert [event.as_event() for event in quick.events] == list(slow.events)
    return "read"


def tenants_file(random: Random) -> str:
    lines = []
    for number in range(random.randrange(4)):
        tree: Any = {**TENANT, "name": f"t{number}", "key": [f"sk-{number}-0123456789abcdef"]}
        tree = tree if random.random() < 0.5 else bent(random, tree)
        lines.append(json.dumps(tree, default=repr))
    text = _mangled(random, "\n".join(lines).encode()).decode("utf-8", "replace")
    try:
        parse_tenants(text, "keys")
    except ConfigInvalid as error:
        refusal = error.text
    else:
        return "read"
    assert "0123456789abcdef" not in refusal
    return "refused"


def _mangled(random: Random, data: bytes) -> bytes:
    return mangled(random, data) if random.random() < 0.3 else data


PURE: tuple[Callable[[Random], str], ...] = (bus_message, quick_steps, tenants_file)


class Doors:
    """A whole ingress. `base` is well-formed bodies by path."""

    def __init__(self, ingress: Ingress, cluster: FakeCluster, bus: Bus) -> None:
        self._ingress, self._cluster, self._bus = ingress, cluster, bus
        self._address = str(ingress.address).rpartition(":")
        described = document()
        self._root = {"$defs": described["components"]["schemas"]}
        self._bodies = {
            path: described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path in POSTS
        }

    async def http(self, random: Random) -> str:
        """Bytes on a connection, in pieces."""
        path, data = self._body(random)
        method = random.choice((b"POST", b"POST", b"POST", b"GET", b"HEAD", b"OPTIONS", b"PRI", b"A" * 40))
        framing = b"Content-Length: %d\r\n" % len(data)
        if random.random() < 0.2:
            framing, data = b"Transfer-Encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
        head = b"%b %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%b\r\n" % (method, path.encode(), framing)
        whole = random.random() < 0.3
        if not whole:
            place, word = random.randrange(len(head)), random.choice(HTTP_WORDS)
            head = head[:place] + word + head[place:] if random.random() < 0.6 else mangled(random, head)
        answer = await self._sent(random, head + data, ends=not whole)
        if not answer:
            return "closed"
        assert answer.startswith(b"HTTP/1.1 "), answer[:200]
        status = int(answer[9:12])
        assert status != 500, answer[:2000]
        return f"{status // 100}xx"

    async def _sent(self, random: Random, data: bytes, *, ends: bool) -> bytes:
        """Until the server closes, which it does after a whole request. `ends`: nothing more will be said."""
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(self._address[0], int(self._address[2]))
            try:
                for part in _pieces(random, data):
                    writer.write(part)
                    await writer.drain()
                if ends:
                    writer.write_eof()
                return await reader.read()
            except ConnectionError:
                return b""
            finally:
                writer.close()

    async def bus(self, random: Random) -> str:
        """A request at the bus' door, in JSON or msgpack."""
        subject = random.choice((subjects.API_CHAT, subjects.API_COMPLETIONS, subjects.API_MODELS))
        path, data = self._body(random)
        headers = {"content-type": "application/json"}
        if random.random() < 0.4:
            tree = self._tree(random, path)
            headers["content-type"], data = "application/msgpack", _mangled(random, msgpack.packb(tree))
        if random.random() < 0.2:
            headers["isthmus-cancel"] = random.choice((subjects.api_cancel("a", "1"), ">", "", subjects.ROUTE))
        answer = await self._bus.request(subject, data, timeout_s=ANSWER_S, headers=headers)
        status = answer.headers.get("isthmus-status", "200")
        assert status != "500", answer.data[:2000]
        return f"{status[0]}xx"

    def _tree(self, random: Random, path: str) -> Any:
        tree = value(random, self._bodies[path], self._root)
        if isinstance(tree, dict):
            tree = {**tree, "model": "tiny", "n": None} if random.random() < 0.8 else tree
            tree = {name: item for name, item in tree.items() if item is not None}
        for _ in range(random.choice((0, 0, 1, 2))):
            tree = bent(random, tree)
        return tree

    def _body(self, random: Random) -> tuple[str, bytes]:
        path = random.choice(POSTS)
        text = json.dumps(self._tree(random, path), default=repr)
        return path, _mangled(random, text.encode("utf-8", "surrogatepass"))

    async def idle(self) -> None:
        """Nothing is left behind: no request, no connection."""
        server = self._ingress.server
        assert server is not None
        await eventually(
            lambda: not (self._cluster.held or self._ingress.hub.running or server.connections),
            timeout_s=ANSWER_S,
            what="the end of all requests and connections",
        )


def _pieces(random: Random, data: bytes) -> list[bytes]:
    if random.random() < 0.7 or len(data) < 3:
        return [data]
    cuts = sorted(random.randrange(len(data)) for _ in range(random.randrange(1, 4)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


async def fuzz(seconds: float, *, seed: int, rounds: int | None = None) -> Counter[str]:
    """Runs for that long, or for so many rounds. Raises what it finds, with the seed in a note."""
    random, outcomes = Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        async with ingress_stack(write_text_folder(Path(folder) / "model"), "ok") as (ingress, cluster, broker):
            doors = Doors(ingress, cluster, broker.client("fuzz"))
            began_s, warm_bytes, done = time.monotonic(), 0, 0
            while (time.monotonic() - began_s < seconds) if rounds is None else done < rounds:
                done += 1
                try:
                    await _round(random, doors, outcomes)
                except BaseException as finding:
                    finding.add_note(f"seed {seed}, round {done}")
                    raise
                if not warm_bytes and time.monotonic() - began_s > seconds * WARM_UP:
                    warm_bytes = resident_bytes()
            await doors.idle()
            grown_bytes = resident_bytes() - warm_bytes if warm_bytes else 0
            outcomes["MiB grown"] = grown_bytes >> 20
            assert grown_bytes <= MAX_GROWTH_BYTES, f"seed {seed}: memory grew by {grown_bytes >> 20} MiB"
    return outcomes


async def _round(random: Random, doors: Doors, outcomes: Counter[str]) -> None:
    for target in PURE:
        for _ in range(4):
            outcomes[f"{target.__name__} {target(random)}"] += 1
    outcomes[f"http {await doors.http(random)}"] += 1
    outcomes[f"bus {await doors.bus(random)}"] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    seed = secrets.randbelow(2**48) if given.seed is None else given.seed
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    outcomes = asyncio.run(fuzz(given.seconds, seed=seed))
    lines = [f"{name}: {count}" for name, count in sorted(outcomes.items())]
    sys.stdout.write(f"seed={seed} seconds={given.seconds:g} findings=0\n  " + "\n  ".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
