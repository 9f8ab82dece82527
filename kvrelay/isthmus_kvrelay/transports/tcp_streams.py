"""The data streams of a TCP lane: blocking threads that send straight from the pool and receive straight into it."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable

from isthmus_kvrelay.core.events import ChunkLanded, ChunkSent, Event, LaneId, SendChunk, SlotQuiet
from isthmus_kvrelay.transports.landing import LandingTable
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_kvrelay.wire import HEADER_BYTES, FrameType, Header, checksum, flow_digest
from isthmus_shared.errors import IsthmusError, PartyLost, ProtocolViolation

BATCH_CHUNKS = 8
"""Chunks gathered into one `sendmsg`: 2 MiB at the default slot size."""

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
        report: Callable[[Event], None],
        lost: Callable[[LaneId, IsthmusError], None],
        refused: Callable[[], None],
    ) -> None:
        """`report`, `lost` and `refused` (a chunk without credit) are thread-safe. Digests are of incarnations."""
        self.lane, self.me, self.peer = lane, me, peer
        self.pool, self.landing = pool, landing
        self.report, self.lost, self.refused = report, lost, refused
        self.jobs: SendQueue = queue.SimpleQueue()


def start_threads(ends: Ends, sock: socket.socket, stream: int) -> list[threading.Thread]:
    """One thread per direction. They end when the socket is shut down and the queue has given them its None."""
    threads = [
        threading.Thread(target=_send_all, args=(ends, sock), name=f"relay-send-{ends.lane}-{stream}", daemon=True),
        threading.Thread(target=_receive_all, args=(ends, sock), name=f"relay-recv-{ends.lane}-{stream}", daemon=True),
    ]
    for thread in threads:
        thread.start()
    return threads


def not_sent(job: SendChunk) -> ChunkSent:
    return ChunkSent(job.lane, job.key, job.chunk, job.out_of, ok=False)


def _send_all(ends: Ends, sock: socket.socket) -> None:
    alive = True
    while True:
        batch, last = _next_batch(ends.jobs)
        if batch and alive:
            try:
                _send_batch(ends, sock, batch)
            except OSError as error:
                alive = False
                ends.lost(ends.lane, PartyLost("the lane to a peer broke", why=str(error)))
        for job in batch:
            ends.report(ChunkSent(job.lane, job.key, job.chunk, job.out_of, ok=alive))
        if last:
            return


def _next_batch(jobs: SendQueue) -> tuple[list[SendChunk], bool]:
    batch: list[SendChunk] = []
    job = jobs.get()
    while job is not None:
        batch.append(job)
        if len(batch) == BATCH_CHUNKS:
            return batch, False
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            return batch, False
    return batch, True


def _send_batch(ends: Ends, sock: socket.socket, batch: list[SendChunk]) -> None:
    parts: list[memoryview | bytes] = []
    for job in batch:
        payload = ends.pool.view(job.out_of.slot, 0, job.size_bytes)
        flow = flow_digest(job.key)
        header = Header(
            FrameType.CHUNK,
            job.size_bytes,
            ends.me,
            ends.peer,
            checksum(payload, flow=flow, chunk=job.chunk),
            job.chunk,
            job.into,
            job.offset_bytes,
            flow,
            job.key.generation,
        )
        parts += (header.encode(), payload)
    left = [memoryview(part) for part in parts]
    while left:
        sent = sock.sendmsg(left)
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


def _receive_all(ends: Ends, sock: socket.socket) -> None:
    scratch = memoryview(bytearray(ends.pool.slot_bytes))
    head = memoryview(bytearray(HEADER_BYTES))
    try:
        while _fill(sock, head):
            header = Header.decode(head, limit=ends.pool.slot_bytes)
            if header.type is not FrameType.CHUNK or (header.sender, header.receiver) != (ends.peer, ends.me):
                raise ProtocolViolation("a data stream carried what is no chunk of this lane")
            if not _receive_chunk(ends, sock, header, scratch):
                break
        ends.lost(ends.lane, PartyLost("the peer closed the lane"))
    except OSError as error:
        ends.lost(ends.lane, PartyLost("the lane to a peer broke", why=str(error)))
    except ProtocolViolation as error:
        ends.lost(ends.lane, error)


def _receive_chunk(ends: Ends, sock: socket.socket, header: Header, scratch: memoryview) -> bool:
    """One payload, into its credited slot or, without credit, nowhere. False at the stream's end."""
    claim = ends.landing.begin(header, ends.lane)
    if claim is None:
        ends.refused()
        return _fill(sock, scratch[: header.payload_bytes])
    landing, view = claim
    if not _fill(sock, view):
        return False  # the claim stays until this thread has ended, then the lane reports the slot quiet
    expected = landing.expected
    intact = checksum(view, flow=header.flow, chunk=header.chunk) == header.checksum
    if ends.landing.finish(landing):
        ends.report(ChunkLanded(ends.lane, expected.key, expected.chunk, expected.into, intact))
    else:
        ends.report(SlotQuiet(expected.into))
    return True


def _fill(sock: socket.socket, view: memoryview) -> bool:
    """Receive exactly that many bytes. False when the peer has closed."""
    done = 0
    while done < len(view):
        got = sock.recv_into(view[done:], 0, socket.MSG_WAITALL)
        if got == 0:
            return False
        done += got
    return True
