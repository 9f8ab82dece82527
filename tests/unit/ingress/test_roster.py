from __future__ import annotations

import pytest

from isthmus_ingress.roster import Model, Roster
from isthmus_ingress.saga_types import WorkerBack, WorkerGone
from isthmus_shared.bus.memory import MemoryBroker
from isthmus_shared.errors import ModelNotFound, Unavailable
from isthmus_shared.ids import Incarnation, WorkerId
from isthmus_shared.messages.health import ProcessState, Role, WorkerHeartbeat
from isthmus_testing.fake_cluster import FakeCluster, FakeWorker


@pytest.fixture
async def beat() -> WorkerHeartbeat:
    cluster = FakeCluster(MemoryBroker().client())
    return FakeWorker(cluster, "p1", (Role.PREFILL,)).heartbeat()


def change(beat: WorkerHeartbeat, **fields: object) -> WorkerHeartbeat:
    return beat.model_copy(update=fields)


async def test_a_worker_is_silent_after_four_of_its_own_intervals(beat: WorkerHeartbeat) -> None:
    roster = Roster()
    roster.beat(change(beat, interval_s=0.5), now_s=10.0)
    assert roster.silent(now_s=12.0) == []
    (gone,) = roster.silent(now_s=12.01)
    assert (gone.incarnation, gone.certain) == (beat.incarnation, False)
    assert roster.silent(now_s=99.0) == [], "reported once"
    assert roster.models == ()


async def test_who_was_silent_is_back_with_its_next_beat(beat: WorkerHeartbeat) -> None:
    roster = Roster()
    roster.beat(change(beat, interval_s=0.5), now_s=10.0)
    assert len(roster.silent(now_s=20.0)) == 1
    assert roster.beat(beat, now_s=21.0) == WorkerBack(beat.incarnation)
    assert roster.beat(beat, now_s=21.5) is None, "once"
    roster.lost(beat.incarnation)
    assert roster.beat(beat, now_s=22.0) is None, "whoever saw it end knows better"
    roster.called_silent(beat.incarnation)
    assert roster.beat(beat, now_s=22.5) == WorkerBack(beat.incarnation), "others had not heard it"


async def test_silence_that_is_ours_counts_for_nothing(beat: WorkerHeartbeat) -> None:
    roster = Roster()
    roster.beat(beat, now_s=0.0)
    roster.excuse(now_s=50.0)
    assert roster.silent(now_s=51.0) == []


async def test_a_new_life_is_the_end_of_the_old_one(beat: WorkerHeartbeat) -> None:
    roster = Roster()
    assert roster.beat(beat, now_s=0.0) is None
    assert roster.beat(beat, now_s=0.5) is None
    gone = roster.beat(change(beat, incarnation=Incarnation("next")), now_s=1.0)
    assert isinstance(gone, WorkerGone)
    assert (gone.incarnation, gone.certain) == (beat.incarnation, True)


async def test_a_model_is_as_long_as_its_shortest_worker_that_is_ready(beat: WorkerHeartbeat) -> None:
    roster = Roster()
    roster.beat(change(beat, max_model_len_tokens=100), now_s=0)
    roster.beat(change(beat, worker_id=WorkerId("b"), max_model_len_tokens=50), now_s=0)
    late = change(beat, worker_id=WorkerId("c"), max_model_len_tokens=10, state=ProcessState.DRAINING)
    roster.beat(late, now_s=0)
    assert roster.models == (Model("tiny", 50),)
    assert roster.model(None) == roster.model("tiny") == Model("tiny", 50)
    with pytest.raises(ModelNotFound):
        roster.model("other")


async def test_one_tokenizer_serves_one_model(beat: WorkerHeartbeat) -> None:
    roster = Roster()
    with pytest.raises(Unavailable):
        roster.model("tiny")
    roster.beat(beat, now_s=0)
    roster.beat(change(beat, worker_id=WorkerId("b"), model="other"), now_s=0)
    with pytest.raises(Unavailable, match="ISTHMUS_INGRESS_MODEL_NAME"):
        roster.model("tiny")
    chosen = Roster(model_name="other")
    with pytest.raises(ModelNotFound):
        chosen.model("tiny")
    chosen.beat(beat, now_s=0)
    assert chosen.models == ()
