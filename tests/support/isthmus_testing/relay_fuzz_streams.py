"""The fuzzer's targets with sockets under them: a data stream's trains, and a client's bell.

Each writes hostile bytes to one end and looks at what the other end, the relay's or the client's own code, makes of
them. See `relay_fuzz`.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import socket
from random import Random

import structlog
from structlog.testing import LogCapture

from isthmus_kvrelay import control, wire
from isthmus_kvrelay.client.relay_client import RelayClient
from isthmus_kvrelay.client.source import RelaySource
from isthmus_kvrelay.compiled.load import Loading
from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import ChunkLanded, ExpectChunk, LaneId, SlotQuiet, SlotUse
from isthmus_kvrelay.framing import FrameReader
from isthmus_kvrelay.transports.landing import LandingTable
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_kvrelay.transports.stream import PlainStream
from isthmus_kvrelay.transports.tcp_streams import Ends, broken, receive_all
from isthmus_shared.errors import Cancelled, IsthmusError, ProtocolViolation
from isthmus_shared.ids import Incarnation
from isthmus_testing.relay_world import flow

ME, PEER = wire.incarnation_digest(Incarnation("me")), wire.incarnation_digest(Incarnation("peer"))
LANE = LaneId(1)
SLOT_BYTES, SLOTS, CHUNKS = 512, 16, 6
KEY = flow("a", 1)
TOKEN = secrets.token_bytes(control.TOKEN_BYTES)


@functools.cache
def compiled() -> Loading:
    """Raises `AssertionError` without numba, which is among the development tools."""
    loading = Loading(structlog.wrap_logger(structlog.PrintLogger(), processors=[LogCapture()]))
    loading.start()
    loading.wait()
    assert loading.loops is not None
    return loading


# --- trains


def trains(random: Random) -> None:
    """A stream of trains, mostly bent, read by Python's receiver or the compiled one.

    Whatever comes: only armed slots change, what is said to be whole is what was sent, and each armed use is accounted
    for once.
    """
    pool = SharedPool.create(pool_bytes=SLOTS * SLOT_BYTES, slot_bytes=SLOT_BYTES)
    try:
        table, armed = LandingTable(pool), armed_chunks()
        for expected in armed.values():
            table.arm(expected)
        if random.random() < 0.1:
            for ref in table.revoke(LANE, KEY):
                del armed[ref]
        told, lost = received(random, pool, table, bent_stream(random, list(armed.values())))
        assert len(lost) == 1
        quiet = [event.into for event in told if isinstance(event, SlotQuiet)]
        landed = [event for event in told if isinstance(event, ChunkLanded)]
        accounted = [event.into for event in landed] + quiet + table.revoke_lane(LANE)
        assert sorted(accounted) == sorted(armed)
        assert not len(table)
        for event in landed:
            assert armed[event.into].chunk == event.chunk
            assert not event.intact or bytes(pool.view(event.into.slot, 0, SLOT_BYTES - 1)) == payload(event.chunk)
        touchable = {ref.slot for ref in armed}
        assert not any(any(pool.view(slot, 0, SLOT_BYTES)) for slot in set(range(SLOTS)) - touchable)
    finally:
        pool.close()


def armed_chunks() -> dict[SlotUse, ExpectChunk]:
    refs = [SlotUse(2 * chunk + 1, 7) for chunk in range(CHUNKS)]
    return {
        ref: ExpectChunk(LANE, KEY, chunk, chunk * SLOT_BYTES, SLOT_BYTES - 1, ref) for chunk, ref in enumerate(refs)
    }


def payload(chunk: int) -> bytes:
    return bytes([chunk + 1]) * (SLOT_BYTES - 1)


def bent_stream(random: Random, armed: list[ExpectChunk]) -> bytes:
    """Trains of armed chunks, some of them twice or of another flow or life; then bytes flipped, cut out or added."""
    data = bytearray()
    for _ in range(random.randint(1, 3)):
        jobs = [random.choice(armed) for _ in range(random.randint(1, 4)) if armed]
        data += train(random, jobs)
    for _ in range(random.choice([0, 0, 1, 3])):
        at = random.randrange(len(data))
        match random.randrange(4):
            case 0:
                data[at] ^= 1 << random.randrange(8)
            case 1:
                del data[at : at + random.randint(1, 90)]
            case 2:
                data[at:at] = random.randbytes(random.randint(1, 90))
            case _:
                del data[at:]
        if not data:
            break
    return bytes(data)


def train(random: Random, jobs: list[ExpectChunk]) -> bytes:
    heads = b"".join(chunk_header(random, job).encode() for job in jobs)
    kind = random.choice([*[wire.FrameType.TRAIN] * 20, *wire.FrameType])
    size = random.choice([*[len(heads)] * 20, 0, 79, 2**32 - 1, wire.HEADER_BYTES * (wire.MAX_TRAIN_CHUNKS + 1)])
    front = wire.Header(kind, size, PEER, ME).encode()
    bodies = [payload(job.chunk) for job in jobs]
    digest = wire.flow_digest(KEY)
    seeds = [wire.seed_of(flow=digest, chunk=job.chunk) for job in jobs]
    sums = [wire.seeded_checksum(body, seed) for body, seed in zip(bodies, seeds, strict=True)]
    return front + heads + b"".join(bodies) + b"".join(each.to_bytes(wire.CHECKSUM_BYTES, "big") for each in sums)


def chunk_header(random: Random, job: ExpectChunk) -> wire.Header:
    """Mostly right; else of another flow, slot use, chunk, length or life."""
    flow_digest, into, chunk, size, sender = wire.flow_digest(KEY), job.into, job.chunk, job.size_bytes, PEER
    if random.random() < 0.2:
        match random.randrange(5):
            case 0:
                flow_digest = wire.flow_digest(flow("a", 2))
            case 1:
                into = SlotUse(random.randrange(2 * SLOTS), random.choice([6, 7, 8]))
            case 2:
                chunk = random.choice([chunk + 1, 2**32 - 1])
            case 3:
                size = random.choice([0, 1, SLOT_BYTES, SLOT_BYTES + 1])
            case _:
                sender = ME
    at = chunk * SLOT_BYTES
    return wire.Header(wire.FrameType.CHUNK, size, sender, ME, 0, chunk, into, at, flow_digest, KEY.generation)


def received(
    random: Random, pool: SharedPool, table: LandingTable, data: bytes
) -> tuple[list[ev.Event], list[IsthmusError]]:
    """What the lane's receiving end reports of those bytes: its events, and how it ended."""
    told: list[ev.Event] = []
    lost: list[IsthmusError] = []
    ends = Ends(
        LANE,
        me=ME,
        peer=PEER,
        pool=pool,
        landing=table,
        checksums=True,
        report=told.extend,
        lost=lambda lane, error: lost.append(error),
        refused=lambda: None,
    )
    ours, theirs = socket.socketpair()
    stream = PlainStream(theirs, compiled() if random.random() < 0.5 else None)
    try:
        with ours:
            ours.setblocking(False)
            ours.sendall(data)  # fits the socket's buffer, or raises
        receive_all(ends, stream)
    finally:
        stream.close()
    assert broken().why not in [error.why for error in lost], "a bug"
    return told, lost


# --- the bell


def rings(random: Random) -> None:
    """A consumer that is told and rung anything: it takes its transfer for filled at its own token only."""
    pool = SharedPool.create(pool_bytes=SLOTS * SLOT_BYTES, slot_bytes=SLOT_BYTES)
    try:
        asyncio.run(rung(random, pool))
    finally:
        pool.close()


async def rung(random: Random, pool: SharedPool) -> None:
    client = RelayClient()
    source = RelaySource(KEY, pull=1, total_bytes=SLOT_BYTES, deadline_s=60.0, pool=pool, post=lambda message: None)
    client._welcome.cancel()  # nobody connects
    client._sources[KEY] = source
    reader, may_arrive = FrameReader(limit=control.MAX_RELAY_FRAME_BYTES), False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            for _ in range(12):
                if random.random() < 0.5:
                    ring = random.choice([TOKEN, TOKEN[:-1], TOKEN + b"x", b"", random.randbytes(16), bytes(500)])
                    may_arrive = may_arrive or ring == source.token
                    stranger.sendto(ring, client._bell.name)
                    client._bell._read()
                else:
                    for said in reader.feed(bent_word(random)):
                        message = control.decode_from_relay(said)
                        if isinstance(message, control.SourceReadyNotice):
                            may_arrive = may_arrive or (message.key, message.pull) == (KEY, 1)
                        client.take(message)
                        if isinstance(message, control.SinkAttachedNotice):
                            client._bell.ring(message.bell, message.token)
                assert may_arrive or not source._arrived, "it was never told"
                assert len(client._rings) <= 12
    except ProtocolViolation:
        pass  # the connection is closed with it
    finally:
        client.gone(ProtocolViolation("over"))


def bent_word(random: Random) -> bytes:
    """What a relay says of a transfer within a node, framed; now and then with a byte changed, or cut."""
    names, slots = control.names_of(KEY), control.pack_indices((random.randrange(SLOTS),))
    pull = random.choice([1, 1, 1, 2])
    attached = control.SourceAttachedNotice(**names, pull=pull, slots=slots, chunk_bytes=SLOT_BYTES, token=TOKEN)
    bell = random.randbytes(random.randint(1, control.MAX_NAME_BYTES))
    said: list[control.RelayMessage] = [
        attached,
        attached,
        control.SinkAttachedNotice(**names, bell=bell, token=TOKEN),
        control.SourceReadyNotice(*KEY, pull, slots, SLOT_BYTES),
        control.SourceFailedNotice(**names, pull=pull, fault=Cancelled("x").to_fault()),
    ]
    data = bytearray(control.encode(random.choice(said)))
    if random.random() < 0.4:
        data[random.randrange(4, len(data))] ^= 1 << random.randrange(8)
    return bytes(data if random.random() < 0.95 else data[: random.randrange(len(data))])
