"""What a completed write may mean, and when a slot is quiet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from isthmus_kvrelay.core.events import ExpectChunk, FlowKey, LaneId, SlotUse
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_kvrelay.transports.verbs.landings import Landings
from isthmus_kvrelay.transports.verbs.memory import Heads, immediate, slot_of
from isthmus_kvrelay.wire import FrameType, Header, checksum, flow_digest
from isthmus_shared.errors import ProtocolViolation
from isthmus_shared.ids import Generation, TransferId

SLOT, LANE, OTHER_LANE = 4096, LaneId(2), LaneId(4)
KEY = FlowKey(TransferId("t"), Generation(3))
ME, PEER = b"me------", b"peer----"
USE = SlotUse(5, 4097)
EXPECTED = ExpectChunk(LANE, KEY, 2, 2 * SLOT, 100, USE)


class Memory:
    def __init__(self) -> None:
        self.pool = SharedPool.create(pool_bytes=8 * SLOT, slot_bytes=SLOT)
        self.heads = Heads(8)
        self.landings = Landings(self.pool, self.heads)

    def write(self, **changes: object) -> None:
        """What the peer's adapter does."""
        payload = self.pool.view(USE.slot, 0, 100)
        payload[:] = bytes(range(100))
        flow = flow_digest(KEY)
        header = Header(
            FrameType.CHUNK, 100, PEER, ME, checksum(payload, flow=flow, chunk=2), 2, USE, 2 * SLOT, flow, 3
        )
        self.heads.put(USE.slot, dataclasses.replace(header, **changes).encode())  # type: ignore[arg-type]

    def completed(self, imm: int = immediate(USE.slot, USE.use), lane: LaneId = LANE) -> object:
        return self.landings.completed(lane, imm, sender=PEER, receiver=ME)


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.heads.close()
    made.pool.close()


def test_a_credited_chunk_lands_once(memory: Memory) -> None:
    memory.landings.arm(EXPECTED)
    memory.write()
    assert memory.completed() == (EXPECTED, True)
    assert memory.completed() is None
    assert len(memory.landings) == 0


def test_damage_is_seen_before_the_core_hears_of_the_chunk(memory: Memory) -> None:
    memory.landings.arm(EXPECTED)
    memory.write()
    memory.pool.view(USE.slot, 50, 1)[0] ^= 1
    assert memory.completed() == (EXPECTED, False)


@pytest.mark.parametrize("use", [USE.use - 1, USE.use + 1])
def test_a_late_completion_of_another_use_of_the_slot_is_ignored(memory: Memory, use: int) -> None:
    memory.landings.arm(EXPECTED)
    memory.write()
    assert memory.completed(immediate(USE.slot, use)) is None
    assert memory.completed() == (EXPECTED, True)


def test_another_lane_cannot_complete_it(memory: Memory) -> None:
    memory.landings.arm(EXPECTED)
    memory.write()
    assert memory.completed(lane=OTHER_LANE) is None


@pytest.mark.parametrize(
    "changes",
    [{"generation": 2}, {"chunk": 1}, {"payload_bytes": 99}, {"offset_bytes": 0}, {"flow": bytes(16)}, {"sender": ME}],
)
def test_a_chunk_other_than_the_credited_one_is_a_violation(memory: Memory, changes: dict[str, object]) -> None:
    memory.landings.arm(EXPECTED)
    memory.write(**changes)
    with pytest.raises(ProtocolViolation):
        memory.completed()
    assert memory.landings.lane_gone(LANE) == [USE]


def test_a_revoked_flow_is_disarmed_and_a_write_that_still_comes_means_nothing(memory: Memory) -> None:
    memory.landings.arm(EXPECTED)
    other = dataclasses.replace(EXPECTED, key=FlowKey(TransferId("other"), Generation(1)), into=SlotUse(6, 1))
    memory.landings.arm(other)
    assert memory.landings.revoke(LANE, KEY) == [USE]
    assert memory.landings.revoke(LANE, KEY) == []
    memory.write()
    assert memory.completed() is None
    assert memory.landings.lane_gone(LANE) == [SlotUse(6, 1)]


def test_an_immediate_names_the_slot_and_the_low_bits_of_its_use() -> None:
    assert slot_of(immediate(1_048_575, 2**40 + 7)) == 1_048_575
    assert immediate(3, 1) != immediate(3, 2)
    assert immediate(1_048_575, 4095) < 2**32
