from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from isthmus_kvrelay.core.events import ExpectChunk, LaneId, SlotUse
from isthmus_kvrelay.transports.landing import LandingTable
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_kvrelay.wire import FrameType, Header, flow_digest
from isthmus_testing.relay_world import flow

KEY, LANE = flow("a", 3), LaneId(7)
EXPECTED = ExpectChunk(LANE, KEY, chunk=2, offset_bytes=8192, size_bytes=100, into=SlotUse(1, 5))
HEADER = Header(
    FrameType.CHUNK,
    100,
    sender=bytes(8),
    receiver=bytes(8),
    chunk=2,
    into=SlotUse(1, 5),
    offset_bytes=8192,
    flow=flow_digest(KEY),
    generation=3,
)


@pytest.fixture
def table() -> Iterator[LandingTable]:
    pool = SharedPool.create(pool_bytes=4 * 4096, slot_bytes=4096)
    yield LandingTable(pool)
    pool.close()


def test_a_credited_chunk_lands_once(table: LandingTable) -> None:
    table.arm(EXPECTED)
    claim = table.begin(HEADER, LANE)
    assert claim is not None
    assert len(claim[1]) == 100
    assert table.begin(HEADER, LANE) is None, "a duplicate while the first is being received"
    assert table.finish(claim[0])
    assert table.begin(HEADER, LANE) is None, "a duplicate afterwards"
    assert len(table) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"chunk": 1},
        {"into": SlotUse(1, 4)},
        {"into": SlotUse(2, 5)},
        {"offset_bytes": 0},
        {"payload_bytes": 99},
        {"generation": 2},
        {"flow": flow_digest(flow("b", 3))},
    ],
)
def test_a_chunk_that_differs_in_anything_has_no_credit(table: LandingTable, change: dict[str, object]) -> None:
    table.arm(EXPECTED)
    assert table.begin(replace(HEADER, **change), LANE) is None  # type: ignore[arg-type]
    assert table.begin(HEADER, LANE) is not None


def test_another_lane_has_no_credit(table: LandingTable) -> None:
    table.arm(EXPECTED)
    assert table.begin(HEADER, LaneId(8)) is None


def test_a_revoked_slot_is_quiet_at_once_unless_something_is_being_received_into_it(table: LandingTable) -> None:
    idle = replace(EXPECTED, chunk=3, into=SlotUse(2, 1))
    table.arm(EXPECTED)
    table.arm(idle)
    claim = table.begin(HEADER, LANE)
    assert claim is not None
    assert table.revoke(LANE, KEY) == [idle.into]
    assert not table.finish(claim[0]), "it is the receiver that says so, when it is done"
    assert len(table) == 0


def test_a_lost_lane_leaves_every_slot_quiet(table: LandingTable) -> None:
    other = replace(EXPECTED, lane=LaneId(8), into=SlotUse(3, 1))
    table.arm(EXPECTED)
    table.arm(other)
    table.begin(HEADER, LANE)
    assert table.revoke_lane(LANE) == [EXPECTED.into]
    assert len(table) == 1
