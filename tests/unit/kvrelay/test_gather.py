"""Few and large descriptors, however finely an engine fills."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from isthmus_kvrelay import control
from isthmus_kvrelay.client.outbox import Outbox
from isthmus_kvrelay.client.sink import RelaySink, map_range
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_testing.relay_world import flow

SLOT_BYTES = 4096
KEY = flow("t", 1)


@pytest.fixture
def pool() -> Iterator[SharedPool]:
    pool = SharedPool.create(pool_bytes=8 * SLOT_BYTES, slot_bytes=SLOT_BYTES)
    yield pool
    pool.close()


def test_slots_side_by_side_are_one_view_and_others_are_not(pool: SharedPool) -> None:
    total = 4 * SLOT_BYTES - 100
    views = map_range(pool, (2, 3, 5, 6), SLOT_BYTES, total, 0, total)
    assert [len(view) for view in views] == [2 * SLOT_BYTES, 2 * SLOT_BYTES - 100]
    views[0][SLOT_BYTES : SLOT_BYTES + 3] = b"abc"
    views[1][:3] = b"def"
    assert (bytes(pool.view(3, 0, 3)), bytes(pool.view(5, 0, 3))) == (b"abc", b"def")
    for view in views:
        view.release()


def test_a_range_keeps_its_order_whatever_the_slots_order(pool: SharedPool) -> None:
    for slot in range(4):
        pool.view(slot, 0, SLOT_BYTES)[:] = bytes([slot]) * SLOT_BYTES
    views = map_range(pool, (1, 0, 3, 2), SLOT_BYTES, 4 * SLOT_BYTES, 10, 3 * SLOT_BYTES)
    found = b"".join(views)
    wanted = b"".join(bytes([slot]) * SLOT_BYTES for slot in (1, 0, 3, 2))[10 : 10 + 3 * SLOT_BYTES]
    assert found == wanted


def test_chunks_smaller_than_slots_are_views_of_their_own(pool: SharedPool) -> None:
    views = map_range(pool, (0, 1), SLOT_BYTES // 2, SLOT_BYTES, 0, SLOT_BYTES)
    assert [len(view) for view in views] == [SLOT_BYTES // 2] * 2


async def test_what_is_filled_in_one_turn_of_the_loop_travels_in_one_frame(pool: SharedPool) -> None:
    said: list[control.ClientMessage] = []
    outbox = Outbox(asyncio.get_running_loop(), said.extend)
    sink = RelaySink(
        KEY, total_bytes=8 * SLOT_BYTES, slots=range(8), chunk_bytes=SLOT_BYTES, pool=pool, post=outbox.post
    )
    for start in range(0, 8 * SLOT_BYTES, 64):
        sink.filled(start, 64)
    outbox.flush()
    (message,) = said
    assert isinstance(message, control.FilledNotice)
    assert control.unpack_indices(message.chunks) == tuple(range(8))


async def test_a_newer_report_replaces_one_that_has_not_left(pool: SharedPool) -> None:
    said: list[control.ClientMessage] = []
    outbox = Outbox(asyncio.get_running_loop(), said.extend)
    for free in (5, 4, 3):
        outbox.post(control.StepNotice(step_s=0.02, kv_blocks_free=free, kv_block_tokens=16))
    outbox.flush()
    assert [m.kv_blocks_free for m in said if isinstance(m, control.StepNotice)] == [3]
