"""What becomes of a lane whose threads meet a bug, or cannot be started."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from isthmus_kvrelay import wire
from isthmus_kvrelay.compiled.load import Loading
from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import LaneId
from isthmus_kvrelay.transports.landing import LandingTable
from isthmus_kvrelay.transports.shm import SharedPool
from isthmus_kvrelay.transports.tcp_streams import Ends, broken, start_threads
from isthmus_shared.errors import IsthmusError, PartyLost
from isthmus_shared.ids import Incarnation
from isthmus_testing.relay_world import flow

ME, PEER = (wire.incarnation_digest(Incarnation(name)) for name in ("me", "peer"))
LANE, SLOT_BYTES = LaneId(1), 512
WAIT_S = 30.0


class Faulty:
    """A stream that meets a bug in one direction; the other waits until it is shut down."""

    def __init__(self, faulty: str) -> None:
        self._faulty, self.is_shut, self.closed = faulty, threading.Event(), False

    def _wait(self, way: str) -> Any:
        if way == self._faulty:
            raise ZeroDivisionError("a bug")
        assert self.is_shut.wait(WAIT_S)

    def send(self, _parts: Sequence[memoryview]) -> None:
        self._wait("send")

    def receive(self, _views: Sequence[memoryview]) -> bool:
        self._wait("receive")
        return False

    def send_train(self, _head: bytes, _payloads: Sequence[memoryview], _seeds: Any) -> None:
        self._wait("send")

    def receive_train(self, _views: Sequence[memoryview], _seeds: Any) -> None:
        self._wait("receive")

    def more_waits(self) -> bool:
        return False

    def shut(self) -> None:
        self.is_shut.set()

    def close(self) -> None:
        self.closed = True


class Lane:
    """The threads' side of one lane, and what they told."""

    def __init__(self, pool: SharedPool) -> None:
        self.told: list[ev.Event] = []
        self.lost: list[IsthmusError] = []
        self.is_lost = threading.Event()
        self.ends = Ends(
            LANE,
            me=ME,
            peer=PEER,
            pool=pool,
            landing=LandingTable(pool),
            checksums=False,
            report=self.told.extend,
            lost=self._lose,
            refused=lambda: None,
        )

    def _lose(self, _lane: LaneId, error: IsthmusError) -> None:
        self.lost.append(error)
        self.is_lost.set()


@pytest.fixture
def pool() -> Iterator[SharedPool]:
    made = SharedPool.create(pool_bytes=4 * SLOT_BYTES, slot_bytes=SLOT_BYTES)
    yield made
    made.close()


@pytest.mark.parametrize("way", ["send", "receive"])
def test_a_bug_in_a_data_thread_is_the_lanes_loss(pool: SharedPool, way: str) -> None:
    lane, stream = Lane(pool), Faulty(way)
    threads = start_threads(lane.ends, [stream])
    use = ev.SlotUse(0, 1)
    lane.ends.jobs.put(ev.SendChunk(LANE, flow("a", 1), 0, 0, SLOT_BYTES, use, use))
    assert lane.is_lost.wait(WAIT_S)
    assert [(error.code, error.why) for error in lane.lost] == [("party_lost", broken().why)]
    stream.shut()
    lane.ends.jobs.put(None)
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    (sent,) = [event for event in lane.told if isinstance(event, ev.ChunkSent)]
    assert sent.ok == (way != "send"), "its slot is free again"


def test_where_a_thread_cannot_be_started_none_is_left_and_the_lane_is_refused(
    pool: SharedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    streams = [Faulty("none"), Faulty("none")]
    with pytest.raises(PartyLost, match="threads cannot be started"):
        start_threads(Lane(pool).ends, streams)
    assert len(started) == 3
    assert not any(thread.is_alive() for thread in started)
    assert all(stream.closed for stream in streams)


def test_compiled_loops_for_which_no_thread_can_be_had_are_loaded_once_one_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    loading = Loading(structlog.get_logger())
    with monkeypatch.context() as patched, capture_logs() as logged:
        patched.setattr(threading.Thread, "start", refuse)
        loading.start()
        loading.wait()
    assert [(line["event"], line["why"]) for line in logged] == [
        ("relay.without_compiled_loops", "can't start new thread")
    ]
    assert loading.loops is None
    assert loading.settled
    with capture_logs() as logged:
        loading.start()
        loading.wait()
    assert [line["event"] for line in logged] == ["relay.compiled_loops"]
    assert loading.loops is not None
