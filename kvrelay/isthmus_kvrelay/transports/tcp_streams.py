"""The data streams of a TCP lane: blocking threads that send straight from the pool and receive straight into it.

What costs is not the bytes but the calls and the hand-overs between threads, so chunks travel in trains: one call
sends many slots, one call receives many, and the loop is told of all of them at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import structlog

from isthmus_kvrelay.core.events import ChunkLanded, ChunkSent, Event, LaneId, SendChunk, SlotQuiet
from isthmus_kvrelay.transports.landing import Landing, LandingTable
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_kvrelay.transports.stream import Stream
from isthmus_kvrelay.wire import (
    HEADER_BYTES,
    MAX_TRAIN_CHUNKS,
    FrameType,
    Header,
    flow_digest,
    seed_of,
)
from isthmus_shared.errors import IsthmusError, PartyLost, ProtocolViolation

log = structlog.get_logger()

TRAIN_BYTES = 4 << 20
"""A train ends with the chunk that reaches this. Measured on loopback: from 4 MiB on a call's cost no longer shows."""

REPORT_BYTES = 16 << 20
"""Landed bytes of one stream of which the loop hears at once, at most: it wakes with cold caches, so not too often,
but credit must come back before the peer has used up what it has (64 MiB by default)."""

SendQueue = queue.SimpleQueue[SendChunk | None]
"""None ends the one thread that takes it."""


class Ends:
    """What the threads of one lane share."""

    def __init__(
        self,
        lane: LaneId,
        *,
        me: bytes,
        peer: bytes,
        pool: SharedPool,
        landing: LandingTable,
        checksums: bool,
        report: Callable[[Sequence[Event]], None],
        lost: Callable[[LaneId, IsthmusError], None],
        refused: Callable[[], None],
    ) -> None:
        """`report`, `lost` and `refused` (a chunk without credit) are thread-safe. Digests are of incarnations."""
        self.lane, self.me, self.peer = lane, me, peer
        self.pool, self.landing, self.checksums = pool, landing, checksums
        self.report, self.lost, self.refused = report, lost, refused
        self.jobs: SendQueue = queue.SimpleQueue()


def start_threads(ends: Ends, streams: Sequence[Stream]) -> list[threading.Thread]:
    """One per stream and direction. They end when their stream is shut down and the queue has given the sending ones
    their None. Raises `PartyLost` where this host starts no more; then none runs, and the streams are closed."""
    threads: list[threading.Thread] = []
    try:
        for number, stream in enumerate(streams, 1):
            for way, work in (("send", _send_all), ("recv", receive_all)):
                name = f"relay-{way}-{ends.lane}-{number}"
                thread = threading.Thread(target=work, args=(ends, stream), name=name, daemon=True)
                thread.start()
                threads.append(thread)
    except RuntimeError as error:
        for stream in streams:
            stream.shut()
            ends.jobs.put(None)
        for thread in threads:
            thread.join()
        for stream in streams:
            stream.close()
        raise PartyLost(
            "a lane's threads cannot be started", why=str(error), todo="raise this host's limits"
        ) from error
    return threads


def broken() -> PartyLost:
    """What a lane is told whose thread met a bug: without it, it would stand still until its transfers' deadlines."""
    return PartyLost("the lane to a peer broke", why="this relay met a bug, which its log tells")


def not_sent(job: SendChunk) -> ChunkSent:
    return ChunkSent(job.lane, job.key, job.chunk, job.out_of, ok=False)


# --- sending


def _send_all(ends: Ends, stream: Stream) -> None:
    """The loop hears of what was sent when it has something to do about it: when the next train leaves no more to
    send. So it wakes once for a whole window, and refills that while the last train is under way."""
    alive = True
    sent: list[Event] = []
    while True:
        train, last = _next_train(ends.jobs)
        if sent and ends.jobs.empty():
            ends.report(sent)
            sent = []
        if train and alive:
            try:
                _send_train(ends, stream, train)
            except OSError as error:
                alive = False
                ends.lost(ends.lane, PartyLost("the lane to a peer broke", why=str(error)))
            except Exception:  # a bug
                alive = False
                log.exception("lane.thread_broke", lane=ends.lane)
                ends.lost(ends.lane, broken())
        sent += [ChunkSent(job.lane, job.key, job.chunk, job.out_of, ok=alive) for job in train]
        if sent and (last or not alive or ends.jobs.empty()):
            ends.report(sent)
            sent = []
        if last:
            return


def _next_train(jobs: SendQueue) -> tuple[list[SendChunk], bool]:
    """What waits, at least one chunk unless it is the end."""
    train: list[SendChunk] = []
    size_bytes = 0
    job = jobs.get()
    while job is not None:
        train.append(job)
        size_bytes += job.size_bytes
        if size_bytes >= TRAIN_BYTES or len(train) == MAX_TRAIN_CHUNKS:
            return train, False
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            return train, False
    return train, True


def _send_train(ends: Ends, stream: Stream, train: list[SendChunk]) -> None:
    digests = {key: flow_digest(key) for key in {job.key for job in train}}
    headers = b"".join(_header(ends, job, digests[job.key]) for job in train)
    front = Header(FrameType.TRAIN, len(headers), ends.me, ends.peer).encode()
    payloads = [ends.pool.view(job.out_of.slot, 0, job.size_bytes) for job in train]
    seeds = [seed_of(flow=digests[job.key], chunk=job.chunk) for job in train] if ends.checksums else None
    stream.send_train(front + headers, payloads, seeds)


def _header(ends: Ends, job: SendChunk, flow: bytes) -> bytes:
    return Header(
        FrameType.CHUNK,
        job.size_bytes,
        ends.me,
        ends.peer,
        chunk=job.chunk,
        into=job.into,
        offset_bytes=job.offset_bytes,
        flow=flow,
        generation=job.key.generation,
    ).encode()


# --- receiving


def receive_all(ends: Ends, stream: Stream) -> None:
    """The loop hears of what has landed when nothing more waits in the stream, or enough has come together."""
    landed: list[Event] = []
    landed_bytes = 0
    try:
        scratch = memoryview(bytearray(ends.pool.slot_bytes))
        for headers in _trains(ends, stream):
            events = _receive_train(ends, stream, headers, scratch)
            if events is None:
                break
            landed += events
            landed_bytes += sum(header.payload_bytes for header in headers)
            if landed and (landed_bytes >= REPORT_BYTES or not stream.more_waits()):
                ends.report(landed)
                landed, landed_bytes = [], 0
        ends.lost(ends.lane, PartyLost("the peer closed the lane"))
    except OSError as error:
        ends.lost(ends.lane, PartyLost("the lane to a peer broke", why=str(error)))
    except ProtocolViolation as error:
        ends.lost(ends.lane, error)
    except Exception:  # a bug
        log.exception("lane.thread_broke", lane=ends.lane)
        ends.lost(ends.lane, broken())
    if landed:
        ends.report(landed)


def _trains(ends: Ends, stream: Stream) -> Iterator[list[Header]]:
    """The headers of the payloads that come next, until the peer closes."""
    head = memoryview(bytearray(HEADER_BYTES))
    heads = memoryview(bytearray(HEADER_BYTES * MAX_TRAIN_CHUNKS))
    limit = max(ends.pool.slot_bytes, len(heads))
    while stream.receive([head]):
        front = _checked(ends, head, limit)
        size = front.payload_bytes
        if front.type is not FrameType.TRAIN or size % HEADER_BYTES or not 0 < size <= len(heads):
            raise ProtocolViolation("a data stream carried what is no train of this lane")
        if not stream.receive([heads[:size]]):
            return
        train = [_checked(ends, heads[at : at + HEADER_BYTES], limit) for at in range(0, size, HEADER_BYTES)]
        if any(header.type is not FrameType.CHUNK for header in train):
            raise ProtocolViolation("a train of what are no chunks")
        yield train


def _checked(ends: Ends, data: memoryview, limit: int) -> Header:
    header = Header.decode(data, limit=limit)
    if (header.sender, header.receiver) != (ends.peer, ends.me):
        raise ProtocolViolation("a data stream carried what is of another lane")
    if header.type is FrameType.CHUNK and not 0 < header.payload_bytes <= ends.pool.slot_bytes:
        raise ProtocolViolation(f"a chunk of {header.payload_bytes} bytes where 1 to {ends.pool.slot_bytes} may be")
    return header


def _receive_train(ends: Ends, stream: Stream, headers: list[Header], scratch: memoryview) -> list[Event] | None:
    """Each payload into its credited slot or, without credit, nowhere. None at the stream's end."""
    claims = [ends.landing.begin(header, ends.lane) for header in headers]
    views = [
        claim[1] if claim is not None else scratch[: header.payload_bytes]
        for header, claim in zip(headers, claims, strict=True)
    ]
    seeds = [seed_of(flow=header.flow, chunk=header.chunk) for header in headers] if ends.checksums else None
    intact = stream.receive_train(views, seeds)
    if intact is None:
        return None  # the claims stay until this thread has ended, then the lane reports their slots quiet
    events: list[Event] = []
    for claim, whole in zip(claims, intact, strict=True):
        if claim is None:
            ends.refused()
        else:
            events.append(_landed(ends, claim[0], whole))
    return events


def _landed(ends: Ends, landing: Landing, intact: bool) -> Event:
    expected = landing.expected
    if ends.landing.finish(landing):
        return ChunkLanded(ends.lane, expected.key, expected.chunk, expected.into, intact)
    return SlotQuiet(expected.into)
