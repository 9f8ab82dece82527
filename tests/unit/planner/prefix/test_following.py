"""Whatever is lost on the bus, the index has what the worker has once a snapshot came."""

from __future__ import annotations

from isthmus_planner.prefix.following import MAX_HELD_BACK, Following
from isthmus_planner.prefix.index import PrefixIndex
from isthmus_shared.ids import Incarnation, NodeId, WorkerId
from isthmus_shared.messages.health import ProcessState, Role, WorkerHeartbeat, WorkerLoad
from isthmus_shared.messages.prefix import PrefixEvents, PrefixSnapshot
from isthmus_shared.messages.work import WorkerRef

W = WorkerRef(worker_id=WorkerId("w"), incarnation=Incarnation("life"), node_id=NodeId("n"))
HASHES = [bytes([i]) * 8 for i in range(100)]


def stored(sequence: int, *hashes: bytes) -> PrefixEvents:
    return PrefixEvents(worker=W, sequence=sequence, stored=b"".join(hashes))


def beat(sequence: int) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        incarnation=W.incarnation,
        state=ProcessState.READY,
        interval_s=0.5,
        worker_id=W.worker_id,
        node_id=W.node_id,
        roles=(Role.PREFILL,),
        vendor="cpu",
        engine="sim",
        model="m",
        model_fingerprint="f",
        kv_form="k",
        kv_layout="",
        max_model_len_tokens=100,
        kv_block_tokens=16,
        load=WorkerLoad(),
        prefix_sequence=sequence,
    )


def following() -> Following:
    return Following(PrefixIndex())


def known(follow: Following) -> list[bool]:
    return [bool(follow.index.cached_tokens([each])) for each in HASHES[:5]]


def test_events_in_order_need_no_snapshot_and_doubled_ones_do_nothing() -> None:
    follow = following()
    assert not follow.events(stored(1, HASHES[0]))
    assert not follow.events(stored(2, HASHES[1], HASHES[2]))
    assert not follow.events(PrefixEvents(worker=W, sequence=3, removed=HASHES[1]))
    assert not follow.events(stored(2, HASHES[1], HASHES[2]))
    assert known(follow) == [True, False, True, False, False]


def test_a_gap_asks_once_and_what_came_meanwhile_is_kept() -> None:
    follow = following()
    follow.events(stored(1, HASHES[0]))
    assert follow.events(stored(3, HASHES[2]))
    assert not follow.events(stored(4, HASHES[3]))
    assert not follow.beat(beat(4))
    assert not follow.snapshot(W, PrefixSnapshot(sequence=3, hashes=HASHES[1] + HASHES[2]))
    assert known(follow) == [False, True, True, True, False]
    assert not follow.events(stored(5, HASHES[4]))


def test_more_than_can_wait_for_a_snapshot_is_another_gap() -> None:
    follow = following()
    follow.events(stored(2, HASHES[0]))
    for sequence in range(3, 5 + MAX_HELD_BACK):
        follow.events(stored(sequence, HASHES[1]))
    assert not follow.snapshot(W, PrefixSnapshot(sequence=2))
    assert follow.events(stored(6 + MAX_HELD_BACK, HASHES[2]))


def test_a_planner_that_has_just_started_asks_at_the_first_beat() -> None:
    assert following().beat(beat(7))
    assert not following().beat(beat(0))


def test_a_last_event_that_was_lost_is_missed_one_beat_later() -> None:
    follow = following()
    assert not follow.beat(beat(0))
    assert not follow.beat(beat(1))  # the event may still be on its way
    assert follow.beat(beat(1))
    follow.gave_up(W)
    assert follow.beat(beat(1))
    follow.snapshot(W, PrefixSnapshot(sequence=1, hashes=HASHES[0]))
    assert not follow.beat(beat(1))


def test_the_dead_are_forgotten_and_their_snapshots_come_too_late() -> None:
    follow = following()
    follow.events(stored(1, HASHES[0]))
    follow.events(stored(3, HASHES[1]))
    follow.keep([])
    assert not follow.snapshot(W, PrefixSnapshot(sequence=3, hashes=HASHES[1]))
    assert known(follow) == [False] * 5
    assert len(follow.index) == 0
