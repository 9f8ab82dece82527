"""What may be posted to a rail now, and what a completion says. Pure: the rail posts and polls.

Chunks are numbered in the order in which they are posted; a reliable connection lands them in that order, so one
number tells which have landed. Work-request credits: a chunk takes `WRITES_PER_CHUNK` places of the send queue until a
signalled completion of it or of a later one gives them back, and one of the peer's receives until the peer has posted
another and said so.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from isthmus_kvrelay.core.events import SendChunk
from isthmus_kvrelay.transports.verbs.binding import Depths

WRITES_PER_CHUNK = 2
"""Its header, then its payload with the immediate."""
SPARE_WRITES = 2
"""Places in the send queue that chunks never take: the probe's, and one so that a full queue is never asked for."""
SIGNAL_EVERY = 8
"""Chunks to one signalled completion, and the last of every chain: completions are the receiver's business mostly."""


@dataclass(frozen=True, slots=True)
class Posted:
    number: int
    job: SendChunk


class SendWindow:
    def __init__(self, depths: Depths, *, peer_receives: int) -> None:
        """`depths`: as the device granted them. `peer_receives`: posted at the peer before its first answer."""
        self._most = (depths.send - SPARE_WRITES) // WRITES_PER_CHUNK
        assert self._most >= 1
        self._receives = peer_receives
        """All that the peer has ever posted."""
        self._in_flight: deque[Posted] = deque()
        self.posted = 0
        """Chunks ever posted; the number of the next one."""
        self.in_flight_bytes = 0

    @property
    def room(self) -> int:
        """Chunks that may be posted now."""
        return max(0, min(self._most - len(self._in_flight), self._receives - self.posted))

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def post(self, jobs: list[SendChunk]) -> list[tuple[Posted, bool]]:
        """One chain; with each chunk whether its completion is to be signalled."""
        assert 0 < len(jobs) <= self.room
        chain = []
        for place, job in enumerate(jobs, 1):
            posted = Posted(self.posted, job)
            self.posted += 1
            self._in_flight.append(posted)
            self.in_flight_bytes += job.size_bytes
            chain.append((posted, place == len(jobs) or self.posted % SIGNAL_EVERY == 0))
        return chain

    def completed(self, number: int) -> list[SendChunk]:
        """That chunk has landed, and with it every earlier one."""
        return self._take(number + 1)

    def peer_posted(self, receives: int) -> None:
        """The peer's sum only grows; an older word that comes late changes nothing."""
        self._receives = max(self._receives, receives)

    def peer_landed(self, landed: int) -> tuple[list[SendChunk], list[SendChunk]]:
        """The rail is down and the peer has counted: what has landed, and what must go over another rail."""
        landed_jobs = self._take(landed)
        return landed_jobs, self._take(self.posted)

    def _take(self, below: int) -> list[SendChunk]:
        taken = []
        while self._in_flight and self._in_flight[0].number < below:
            job = self._in_flight.popleft().job
            self.in_flight_bytes -= job.size_bytes
            taken.append(job)
        return taken

    def check_invariants(self) -> None:
        assert len(self._in_flight) <= self._most
        assert self.posted <= self._receives
        assert self.in_flight_bytes == sum(posted.job.size_bytes for posted in self._in_flight)
        numbers = [posted.number for posted in self._in_flight]
        assert numbers == list(range(self.posted - len(numbers), self.posted))


class ReceiveCount:
    """The receiving end's side of it: what has landed, and what the peer has been told of receives."""

    def __init__(self, posted: int) -> None:
        self.posted = self._told = posted
        """All ever posted, and what of it the peer knows."""
        self._step = max(1, posted // 4)
        self.landed = 0

    def landing(self, count: int) -> None:
        """So many have landed and as many receives were posted again."""
        self.landed += count
        self.posted += count

    def to_tell(self) -> int | None:
        """The sum to tell the peer, a quarter of the queue at a time; None: nothing new."""
        if self.posted - self._told < self._step:
            return None
        self._told = self.posted
        return self.posted
