"""Which slots a peer may write into now: asked by receive threads before they take a payload's bytes.

A slot use is armed when its credit is granted. A receive thread claims it (`begin`), writes, and ends the claim
(`finish`). Revoking disarms what nobody has claimed; a claimed one is reported quiet when its claim ends, so that no
slot is reused under a receive in progress. Thread-safe; nothing blocks while the lock is held.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from isthmus_kvrelay.core.events import ExpectChunk, FlowKey, LaneId, SlotUse
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_kvrelay.wire import Header, flow_digest


@dataclass(slots=True)
class Landing:
    """One armed slot use."""

    expected: ExpectChunk
    flow: bytes
    claimed: bool = False
    revoked: bool = False

    def fits(self, header: Header, lane: LaneId) -> bool:
        expected, said = self.expected, header
        return (
            not (self.claimed or self.revoked)
            and lane == expected.lane
            and said.flow == self.flow
            and said.generation == expected.key.generation
            and said.chunk == expected.chunk
            and said.offset_bytes == expected.offset_bytes
            and said.payload_bytes == expected.size_bytes
        )


class LandingTable:
    def __init__(self, pool: SharedPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._armed: dict[SlotUse, Landing] = {}
        self._by_flow: dict[tuple[LaneId, FlowKey], set[SlotUse]] = {}

    def arm(self, expected: ExpectChunk) -> None:
        landing = Landing(expected, flow_digest(expected.key))
        with self._lock:
            assert expected.into not in self._armed
            self._armed[expected.into] = landing
            self._by_flow.setdefault((expected.lane, expected.key), set()).add(expected.into)

    def begin(self, header: Header, lane: LaneId) -> tuple[Landing, memoryview] | None:
        """The landing and the bytes to write, or None when that chunk has no credit (any more)."""
        with self._lock:
            landing = self._armed.get(header.into)
            if landing is None or not landing.fits(header, lane):
                return None
            landing.claimed = True
        return landing, self._pool.view(header.into.slot, 0, header.payload_bytes)

    def finish(self, landing: Landing) -> bool:
        """The claim ends. False: it was revoked meanwhile; report the slot quiet rather than landed."""
        with self._lock:
            self._drop(landing.expected)
            return not landing.revoked

    def revoke(self, lane: LaneId, key: FlowKey) -> list[SlotUse]:
        """Disarm a flow; returns the slot uses that are quiet now. The others follow when their claims end."""
        quiet = []
        with self._lock:
            for ref in list(self._by_flow.get((lane, key), ())):
                landing = self._armed[ref]
                landing.revoked = True
                if not landing.claimed:
                    self._drop(landing.expected)
                    quiet.append(ref)
        return quiet

    def revoke_lane(self, lane: LaneId) -> list[SlotUse]:
        """All that is left of a lane whose receive threads have ended."""
        with self._lock:
            left = [landing.expected for landing in self._armed.values() if landing.expected.lane == lane]
            for expected in left:
                self._drop(expected)
        return [expected.into for expected in left]

    def __len__(self) -> int:
        return len(self._armed)

    def _drop(self, expected: ExpectChunk) -> None:
        del self._armed[expected.into]
        flow = self._by_flow[expected.lane, expected.key]
        flow.discard(expected.into)
        if not flow:
            del self._by_flow[expected.lane, expected.key]
