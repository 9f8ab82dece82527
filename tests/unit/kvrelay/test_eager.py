"""Credit that travels with a pull: who may give it, when it counts, and what a source that declines leaves behind."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import ClientId, Effect, Event, Grant, LaneId, Offer, SlotUse
from isthmus_kvrelay.core.relay import RelayCore
from isthmus_kvrelay.core.settings import RelaySettings
from isthmus_shared.errors import Cancelled
from isthmus_shared.ids import Incarnation
from isthmus_testing.relay_world import SLOT_BYTES, flow

ME, LANE = ClientId(1), LaneId(1)
FAULT = Cancelled("x").to_fault()
CREDIT = (Grant(0, SlotUse(7, 3)), Grant(1, SlotUse(5, 9)))


class Told:
    def __init__(self, **settings: Any) -> None:
        facts = {"incarnation": Incarnation("a"), "slot_bytes": SLOT_BYTES, "total_slots": 16, "out_share": 0.5}
        self.core, self.now_s = RelayCore(RelaySettings(**(facts | settings))), 0.0
        self(ev.ClientUp(ME))
        self(ev.LaneUp(LANE, Incarnation("b")))

    def __call__(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, now_s=self.now_s)
        self.core.check_invariants()
        return effects

    def ask(self, name: str, chunks: int) -> list[Effect]:
        return self(ev.OpenSource(ME, flow(name, 1), Incarnation("b"), "b", chunks * SLOT_BYTES, "m", 10))

    def opened(self, name: str, chunks: int) -> list[Effect]:
        return self(ev.OpenedReceived(LANE, flow(name, 1), 1, chunks * SLOT_BYTES, SLOT_BYTES, "m"))

    def acquainted(self) -> Told:
        """One transfer has come over the lane, so that this relay knows how the peer cuts what it sends."""
        self.ask("first", 1)
        (credit,) = of(self.opened("first", 1), ev.SendCredit)
        self(ev.ChunkLanded(LANE, flow("first", 1), 0, credit.grants[0].into, intact=True))
        self(ev.ReleaseSource(ME, flow("first", 1), consumed=True))
        return self

    def offer(self, *, total: int = 2 * SLOT_BYTES, chunk_bytes: int = SLOT_BYTES, manifest: str = "m") -> list[Effect]:
        """Be asked, with credit, for a transfer of two chunks."""
        return self(ev.PullReceived(LANE, flow("t", 1), 1, Offer(total, chunk_bytes, manifest, CREDIT)))

    def stage(self) -> None:
        self(ev.OpenSink(ME, flow("t", 1), 2 * SLOT_BYTES, "m", 10, 5))
        self(ev.ChunksFilled(ME, flow("t", 1), (0, 1)))


def of(effects: list[Effect], kind: type[Any]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


@pytest.fixture
def tell() -> Told:
    return Told().acquainted()


def test_the_first_pull_on_a_lane_carries_no_credit() -> None:
    (pull,) = of(Told().ask("t", 2), ev.SendPull)
    assert pull.offer is None


def test_credit_goes_with_the_pull_and_the_slots_are_armed_before(tell: Told) -> None:
    effects = tell.ask("t", 2)
    assert [type(effect) for effect in effects] == [ev.ExpectChunk, ev.ExpectChunk, ev.SendPull]
    offer = effects[-1].offer  # type: ignore[union-attr]
    assert (offer.total_bytes, offer.chunk_bytes, offer.manifest) == (2 * SLOT_BYTES, SLOT_BYTES, "m")
    assert [grant.into for grant in offer.grants] == [effect.into for effect in of(effects, ev.ExpectChunk)]
    for chunk, grant in enumerate(offer.grants):
        told = tell(ev.ChunkLanded(LANE, flow("t", 1), chunk, grant.into, intact=True))
    assert len(of(told, ev.SourceReady)) == 1


def test_a_transfer_that_must_wait_for_slots_asks_plainly_and_holds_none_meanwhile(tell: Told) -> None:
    tell.ask("large", 6)
    (pull,) = of(tell.ask("t", 4), ev.SendPull)
    assert pull.offer is None
    assert tell.core.stats().slots["landing"] == 6


def test_one_without_work_requests_gives_its_slots_back() -> None:
    tell = Told(work_requests=2).acquainted()
    tell.ask("u", 2)
    (pull,) = of(tell.ask("t", 2), ev.SendPull)
    assert pull.offer is None
    assert tell.core.stats().slots["landing"] == 2


def test_one_behind_others_in_line_does_not_overtake_them(tell: Told) -> None:
    tell.ask("large", 7)
    tell.ask("waits", 3)
    tell.opened("waits", 3)
    (pull,) = of(tell.ask("t", 1), ev.SendPull)
    assert pull.offer is None, "there is a slot, but another flow was there first"


def test_a_declined_pull_holds_nothing_and_is_answered_later(tell: Told) -> None:
    (pull,) = of(tell.ask("t", 2), ev.SendPull)
    told = tell(ev.DeclinedReceived(LANE, flow("t", 1), 1))
    assert [type(effect) for effect in told] == [ev.RevokeFlow]
    assert tell.core.stats().credits_outstanding_bytes == 0
    assert tell.core.stats().slots["quarantined"] == 2, "this end may still be receiving into them"
    for grant in pull.offer.grants:
        tell(ev.SlotQuiet(grant.into))
    assert tell.core.stats().slots["free"] == 16
    (credit,) = of(tell.opened("t", 2), ev.SendCredit)
    assert not {grant.into for grant in credit.grants} & {grant.into for grant in pull.offer.grants}


def test_a_chunk_of_a_declined_pull_is_not_taken(tell: Told) -> None:
    (pull,) = of(tell.ask("t", 1), ev.SendPull)
    tell(ev.DeclinedReceived(LANE, flow("t", 1), 1))
    assert tell(ev.ChunkLanded(LANE, flow("t", 1), 0, pull.offer.grants[0].into, intact=True)) == []
    assert tell.core.stats().flows_in == 1


def test_a_chunk_of_a_declined_pull_that_the_source_has_cut_otherwise_since_is_not_taken() -> None:
    tell, half = Told(), SLOT_BYTES // 2
    tell.ask("first", 1)
    tell(ev.OpenedReceived(LANE, flow("first", 1), 1, SLOT_BYTES, half, "m"))
    (pull,) = of(tell.ask("t", 2), ev.SendPull)
    tell(ev.DeclinedReceived(LANE, flow("t", 1), 1))
    tell.opened("t", 2)
    late = pull.offer.grants[-1]
    assert late.chunk == 3
    assert tell(ev.ChunkLanded(LANE, flow("t", 1), late.chunk, late.into, intact=True)) == []
    assert tell.core.stats().flows_in == 2


def test_no_further_credit_goes_out_before_a_chunk_has_landed() -> None:
    tell = Told(work_requests=2).acquainted()
    (pull,) = of(tell.ask("t", 4), ev.SendPull)
    first, _ = pull.offer.grants
    tell.now_s += 5
    assert of(tell(ev.Tick()), ev.SendCredit) == []
    told = tell(ev.ChunkLanded(LANE, flow("t", 1), 0, first.into, intact=True))
    assert [grant.chunk for credit in of(told, ev.SendCredit) for grant in credit.grants] == [2]


@pytest.mark.parametrize("when", ["landed", "another pull", "plain"])
def test_a_word_that_declines_nothing_is_stale(tell: Told, when: str) -> None:
    (pull,) = of(tell.ask("t", 2), ev.SendPull)
    if when == "landed":
        tell(ev.ChunkLanded(LANE, flow("t", 1), 0, pull.offer.grants[0].into, intact=True))
    if when == "plain":
        tell(ev.DeclinedReceived(LANE, flow("t", 1), 1))
    before = tell.core.stats()
    assert tell(ev.DeclinedReceived(LANE, flow("t", 1), 2 if when == "another pull" else 1)) == []
    after = tell.core.stats()
    assert after.stale == before.stale + 1
    assert after.credits_outstanding_bytes == before.credits_outstanding_bytes


def test_an_eager_transfer_that_fails_is_revoked_like_any_other(tell: Told) -> None:
    tell.ask("t", 2)
    told = tell(ev.ReleaseSource(ME, flow("t", 1)))
    assert {type(effect) for effect in told} >= {ev.RevokeFlow, ev.SendRevoke}
    assert tell.core.stats().slots["quarantined"] == 2


def test_a_source_that_has_it_all_sends_at_once_and_says_nothing_else(tell: Told) -> None:
    tell.stage()
    told = tell.offer()
    assert [type(effect) for effect in told] == [ev.SendChunk, ev.SendChunk]
    assert [effect.into for effect in of(told, ev.SendChunk)] == [grant.into for grant in CREDIT]


def test_a_source_that_waits_for_staging_declines_and_opens_later(tell: Told) -> None:
    tell(ev.OpenSink(ME, flow("blocks", 1), 8 * SLOT_BYTES, "m", 10, 5))
    tell(ev.OpenSink(ME, flow("t", 1), 2 * SLOT_BYTES, "m", 10, 5))
    assert [type(effect) for effect in tell.offer()] == [ev.SendDeclined]
    tell(ev.AbortByClient(ME, flow("blocks", 1), FAULT))
    opened = of(tell(ev.SinkQuiet(ME, flow("blocks", 1))), ev.SendOpened)
    assert len(opened) == 1
    assert of(tell(ev.ChunksFilled(ME, flow("t", 1), (0, 1))), ev.SendChunk) == [], "the first credit is void"


def test_a_source_that_cuts_otherwise_declines_and_opens_at_once(tell: Told) -> None:
    tell.stage()
    assert [type(effect) for effect in tell.offer(chunk_bytes=SLOT_BYTES // 2)] == [ev.SendDeclined, ev.SendOpened]


@pytest.mark.parametrize("differs", [{"total": SLOT_BYTES}, {"manifest": "other"}])
def test_a_source_sends_nothing_to_one_that_expects_something_else(tell: Told, differs: dict[str, Any]) -> None:
    tell.stage()
    told = tell.offer(**differs)
    (abort,) = of(told, ev.SendAbort)
    assert abort.fault.code == "manifest_mismatch"
    assert of(told, ev.SendChunk) == []
    (ended,) = of(told, ev.SinkEnded)
    assert ended.fault.code == "manifest_mismatch"


def test_a_source_that_knows_no_such_transfer_aborts(tell: Told) -> None:
    (abort,) = tell.offer()
    assert isinstance(abort, ev.SendAbort)
