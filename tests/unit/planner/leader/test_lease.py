"""The lease: exclusive whatever fails, and never held by nobody for long."""

from __future__ import annotations

import pytest

from isthmus_planner.leader.lease import Lease, LeaseTimes, Read, Record, Write
from isthmus_shared.ids import Incarnation
from isthmus_testing.lease_world import LeaseWorld, write_of

ME, OTHER = Incarnation("me"), Incarnation("other")
TIMES = LeaseTimes()
SEEDS = 1000


def leading(*, at_s: float = 0.0, over: Record | None = None) -> Lease:
    """A lease that has just been taken, over a record that was seen for long enough."""
    lease = Lease(ME)
    lease.ask(now_s=at_s - 10)
    lease.found(over or Record(), now_s=at_s - 10)
    write_of(lease.ask(now_s=at_s))
    lease.written(7, now_s=at_s)
    assert lease.epoch(now_s=at_s) is not None
    return lease


@pytest.mark.parametrize("rough", [False, True], ids=["prompt answers", "slow and lossy answers"])
def test_two_never_lead_and_epochs_grow_and_a_leader_is_followed(rough: bool) -> None:
    found = {seed: problems for seed in range(SEEDS) if (problems := LeaseWorld(seed, rough=rough).run())}
    assert not found


def test_a_leader_counts_from_what_it_sent_not_from_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle can fail: a lease that counts from the answer is found out."""

    class FromTheAnswer(Lease):
        def written(self, revision: int, *, now_s: float) -> None:
            super().written(revision, now_s=now_s)
            self._lead(self._epoch or 0, now_s)

    monkeypatch.setattr("isthmus_testing.lease_world.Lease", FromTheAnswer)
    assert any("two lead" in " ".join(LeaseWorld(seed, rough=True).run()) for seed in range(SEEDS))


def test_nobody_leads_before_a_record_was_seen_for_a_whole_lease() -> None:
    lease = Lease(ME)
    assert lease.ask(now_s=0.0) == Read()
    lease.found(Record(revision=5, holder=OTHER, epoch=3, write=9), now_s=0.0)
    assert lease.ask(now_s=TIMES.lease_s - 0.01) == Read()
    lease.found(Record(revision=6, holder=OTHER, epoch=3, write=10), now_s=TIMES.lease_s - 0.01)  # it lives
    assert lease.ask(now_s=TIMES.lease_s + 0.5) == Read()
    lease.found(Record(revision=6, holder=OTHER, epoch=3, write=10), now_s=TIMES.lease_s + 0.5)
    question = lease.ask(now_s=2 * TIMES.lease_s)
    assert question == Write(over=6, record=Record(holder=ME, epoch=4, write=1))


def test_a_released_lease_is_taken_at_once() -> None:
    lease = Lease(ME)
    lease.ask(now_s=0.0)
    lease.found(Record(revision=5, holder=OTHER, epoch=3, write=9, released=True), now_s=0.0)
    assert write_of(lease.ask(now_s=0.0)).record.epoch == 4


def test_an_epoch_is_above_all_that_was_heard_of() -> None:
    lease = Lease(ME)
    lease.ask(now_s=0.0)
    lease.found(Record(), now_s=0.0)
    assert write_of(lease.ask(now_s=TIMES.lease_s, floor=41)).record.epoch == 42


def test_leadership_ends_by_itself_and_a_renewal_keeps_its_epoch() -> None:
    lease = leading()
    until_s = TIMES.lease_s - TIMES.margin_s
    assert lease.epoch(now_s=until_s - 0.01) == 1
    assert lease.epoch(now_s=until_s) is None
    renewal = write_of(lease.ask(now_s=1.0))
    assert (renewal.over, renewal.record.epoch) == (7, 1)
    lease.written(8, now_s=1.2)
    assert lease.epoch(now_s=1.0 + until_s - 0.01) == 1
    assert lease.epoch(now_s=1.0 + until_s) is None, "from when it was sent, not from the answer"


def test_a_renewal_without_an_answer_is_looked_up() -> None:
    lease = leading()
    renewal = write_of(lease.ask(now_s=1.0))
    lease.unknown(now_s=1.5)
    assert lease.ask(now_s=1.6) == Read()
    lease.found(Record(8, ME, 1, renewal.record.write), now_s=1.6)  # it was done
    assert lease.epoch(now_s=2.5) == 1
    assert write_of(lease.ask(now_s=2.5)).over == 8


def test_whoever_finds_another_holder_leads_no_more() -> None:
    lease = leading()
    lease.ask(now_s=1.0)
    lease.refused(now_s=1.1)
    assert lease.next_s == 1.1
    assert lease.ask(now_s=1.1) == Read()
    lease.found(Record(9, OTHER, 2, 1), now_s=1.1)
    assert lease.epoch(now_s=1.1) is None


def test_a_leadership_that_ran_out_begins_again_with_a_new_epoch() -> None:
    lease = leading()
    assert lease.ask(now_s=1.9) == Read()
    lease.found(Record(7, ME, 1, 1), now_s=1.9)
    assert lease.epoch(now_s=1.9) is None
    assert write_of(lease.ask(now_s=TIMES.lease_s + 0.01)).record.epoch == 2


def test_release_ends_it_before_it_is_told() -> None:
    lease = leading()
    told = lease.release()
    assert lease.epoch(now_s=0.1) is None
    assert told is not None
    assert told.record.released
    assert Lease(OTHER).release() is None
