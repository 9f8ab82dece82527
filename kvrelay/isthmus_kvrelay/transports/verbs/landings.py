"""Which slots a peer's writes may complete into now. All on the event loop's thread.

Disarming makes this end deaf to a write, it does not keep the adapter from it: the core keeps a revoked slot out of use
until the sender has said that all its writes have completed, or the lane's queue pairs are destroyed.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_kvrelay.core.events import ExpectChunk, FlowKey, LaneId, SlotUse
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_kvrelay.transports.verbs.memory import Heads, immediate, slot_of
from isthmus_kvrelay.wire import FrameType, Header, checksum, flow_digest
from isthmus_shared.errors import ProtocolViolation


@dataclass(frozen=True, slots=True)
class _Armed:
    expected: ExpectChunk
    flow: bytes


class Landings:
    def __init__(self, pool: SharedPool, heads: Heads) -> None:
        self._pool, self._heads = pool, heads
        self._armed: dict[int, _Armed] = {}
        self._by_flow: dict[tuple[LaneId, FlowKey], set[int]] = {}

    def arm(self, expected: ExpectChunk) -> None:
        slot = expected.into.slot
        assert slot not in self._armed
        self._armed[slot] = _Armed(expected, flow_digest(expected.key))
        self._by_flow.setdefault((expected.lane, expected.key), set()).add(slot)

    def completed(self, lane: LaneId, imm: int, *, sender: bytes, receiver: bytes) -> tuple[ExpectChunk, bool] | None:
        """A write with that immediate has completed: what it was, and whether intact. None: without credit (any more).

        `ProtocolViolation` when the header beside it is not of the chunk that the credit was for.
        """
        armed = self._armed.get(slot_of(imm))
        if armed is None or armed.expected.lane != lane or immediate(slot_of(imm), armed.expected.into.use) != imm:
            return None
        expected = armed.expected
        header = Header.decode(self._heads.get(expected.into.slot), limit=self._pool.slot_bytes)
        said = Header(
            FrameType.CHUNK,
            expected.size_bytes,
            sender,
            receiver,
            header.checksum,
            expected.chunk,
            expected.into,
            expected.offset_bytes,
            armed.flow,
            expected.key.generation,
        )
        if header != said:
            raise ProtocolViolation("a peer wrote another chunk than the one it had credit for")
        payload = self._pool.view(expected.into.slot, 0, expected.size_bytes)
        intact = checksum(payload, flow=armed.flow, chunk=expected.chunk) == header.checksum
        self._drop(expected)
        return expected, intact

    def revoke(self, lane: LaneId, key: FlowKey) -> list[SlotUse]:
        """Disarm a flow; returns what was still armed."""
        return self._give_up([self._armed[slot] for slot in sorted(self._by_flow.get((lane, key), ()))])

    def lane_gone(self, lane: LaneId) -> list[SlotUse]:
        """Its queue pairs are destroyed."""
        return self._give_up([armed for armed in self._armed.values() if armed.expected.lane == lane])

    def __len__(self) -> int:
        return len(self._armed)

    def _give_up(self, armed: list[_Armed]) -> list[SlotUse]:
        for entry in armed:
            self._drop(entry.expected)
        return [entry.expected.into for entry in armed]

    def _drop(self, expected: ExpectChunk) -> None:
        del self._armed[expected.into.slot]
        slots = self._by_flow[expected.lane, expected.key]
        slots.discard(expected.into.slot)
        if not slots:
            del self._by_flow[expected.lane, expected.key]
