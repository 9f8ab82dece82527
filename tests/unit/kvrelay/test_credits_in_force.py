"""The receiver's credits, each at work alone: KV blocks, work requests, host time; quotas; retention; feedback."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import ClientId, Effect, Event, Grant, LaneId, SlotUse
from isthmus_kvrelay.core.granting import CHUNK_COST_US
from isthmus_kvrelay.core.relay import RelayCore
from isthmus_kvrelay.core.room import ROOM_STALE_S
from isthmus_kvrelay.core.settings import RelaySettings
from isthmus_shared.errors import PartyLost
from isthmus_shared.ids import Incarnation
from isthmus_testing.relay_world import SLOT_BYTES, flow

ME, OTHER, LANE, ELSEWHERE = ClientId(1), ClientId(2), LaneId(1), LaneId(2)
LOST = PartyLost("gone").to_fault()


class Told:
    def __init__(self, **settings: Any) -> None:
        facts = {"incarnation": Incarnation("a"), "slot_bytes": SLOT_BYTES, "total_slots": 64, "out_share": 0.5}
        self.core, self.now_s = RelayCore(RelaySettings(**(facts | settings))), 0.0
        for event in (ev.ClientUp(ME), ev.ClientUp(OTHER)):
            self(event)
        self(ev.LaneUp(LANE, Incarnation("b")))
        self(ev.LaneUp(ELSEWHERE, Incarnation("c")))

    def __call__(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, now_s=self.now_s)
        self.core.check_invariants()
        return effects

    def ask(self, name: str, chunks: int, *, client: ClientId = ME, peer: str = "b", kv_tokens: int = 0) -> list[Grant]:
        """Up to granted credit: what was granted at once."""
        lane = LANE if peer == "b" else ELSEWHERE
        size, key = chunks * SLOT_BYTES, flow(name, 1)
        at_once = grants(self(ev.OpenSource(client, key, Incarnation(peer), peer, size, "m", 1e3, 1, kv_tokens)))
        return at_once or grants(self(ev.OpenedReceived(lane, key, 1, size, SLOT_BYTES, "m")))

    def land(self, name: str, grant: Grant, *, lane: LaneId = LANE) -> list[Grant]:
        return grants(self(ev.ChunkLanded(lane, flow(name, 1), grant.chunk, grant.into, intact=True)))

    def after(self, seconds: float) -> list[Grant]:
        self.now_s += seconds
        return grants(self(ev.Tick()))


def grants(effects: list[Effect]) -> list[Grant]:
    """Given alone, or with a pull."""
    given = [effect for effect in effects if isinstance(effect, ev.SendCredit)]
    given += [effect.offer for effect in effects if isinstance(effect, ev.SendPull) and effect.offer is not None]
    return [grant for each in given for grant in each.grants]


def test_no_more_chunks_are_under_way_on_a_lane_than_it_has_work_requests() -> None:
    tell = Told(work_requests=4)
    first = tell.ask("t", 10)
    assert [grant.chunk for grant in first] == [0, 1, 2, 3]
    assert [grant.chunk for grant in tell.land("t", first[0])] == [4]
    assert len(tell.ask("u", 3, peer="c")) == 3, "another lane has its own"


def test_a_lane_whose_transport_has_room_for_fewer_is_granted_no_more() -> None:
    tell = Told(work_requests=4)
    shallow = LaneId(3)
    tell(ev.LaneUp(shallow, Incarnation("d"), via="verbs", depth=2))
    tell(ev.OpenSource(ME, flow("t", 1), Incarnation("d"), "d", 8 * SLOT_BYTES, "m", 1e3))
    granted = grants(tell(ev.OpenedReceived(shallow, flow("t", 1), 1, 8 * SLOT_BYTES, SLOT_BYTES, "m")))
    assert [grant.chunk for grant in granted] == [0, 1]
    tell(ev.ChunkLanded(shallow, flow("t", 1), 0, granted[0].into, intact=True))
    stats = tell.core.stats()
    assert stats.received_via == {"verbs": SLOT_BYTES}
    assert stats.received_bytes == SLOT_BYTES


def test_the_oldest_flow_of_a_lane_goes_on_beside_flows_that_hold_all_work_requests() -> None:
    tell = Told(work_requests=2)
    (one, two) = tell.ask("old", 3)
    assert tell.ask("young", 3) == []
    (three,) = tell.land("old", one)
    assert three.chunk == 2
    granted = tell.land("old", two)
    assert granted
    tell.core.check_invariants()


def test_without_that_credit_all_is_granted_at_once() -> None:
    assert len(Told(work_requests=None).ask("t", 32)) == 32


def test_a_decode_step_lets_in_what_its_budget_pays_for() -> None:
    tell = Told(host_us_per_step=3 * CHUNK_COST_US)
    tell(ev.StepReported(ME, 0.02, 100, 16))
    assert len(tell.ask("t", 20)) == 3
    tell.now_s += 0.02
    assert len(grants(tell(ev.StepReported(ME, 0.02, 100, 16)))) == 3
    assert len(tell.after(0.01)) == 1
    assert tell.core.stats().credits["host_us"].granted == 7 * CHUNK_COST_US


def test_a_consumer_that_decodes_nothing_needs_no_budget() -> None:
    tell = Told(host_us_per_step=CHUNK_COST_US)
    tell(ev.StepReported(ME, 0.02, 100, 16))
    assert len(tell.ask("t", 20)) == 1
    assert len(tell.ask("u", 20, client=OTHER)) == 20
    granted = [grant for _ in range(40) for grant in tell.after(0.01)]
    assert len(granted) == 19, "its steps have ended, and with them the budget"


def test_a_measured_cost_changes_what_a_step_lets_in() -> None:
    tell = Told(host_us_per_step=100.0)
    tell(ev.HostCostMeasured(20.0))
    tell(ev.StepReported(ME, 0.02, 100, 16))
    assert len(tell.ask("t", 20)) == 5


def test_a_flow_is_granted_only_within_the_kv_blocks_that_its_engine_has_free() -> None:
    tell = Told()
    tell(ev.StepReported(ME, 0.02, 10, 16))
    assert tell.ask("t", 1, kv_tokens=100)  # seven blocks
    assert tell.ask("u", 1, kv_tokens=64) == []  # four are not there
    assert tell.ask("v", 1, kv_tokens=16) == [], "nobody overtakes within a client"
    assert tell.ask("w", 1, kv_tokens=64, client=OTHER), "another client does not wait for this one's room"
    assert len(grants(tell(ev.StepReported(ME, 0.02, 12, 16)))) == 2
    account = tell.core.stats().credits["kv_blocks"]
    assert (account.granted, account.consumed, account.returned) == (12, 0, 0)


def test_blocks_are_used_up_by_a_release_and_returned_by_a_failure() -> None:
    tell = Told()
    tell(ev.StepReported(ME, 0.02, 4, 16))
    (grant,) = tell.ask("t", 1, kv_tokens=64)
    assert tell.ask("u", 1, kv_tokens=64) == []
    tell.land("t", grant)
    assert grants(tell(ev.ReleaseSource(ME, flow("t", 1)))) == [], "the engine has used them: there is no room yet"
    assert len(grants(tell(ev.StepReported(ME, 0.02, 4, 16)))) == 1
    tell(ev.AbortReceived(LANE, flow("u", 1), 1, LOST))
    account = tell.core.stats().credits["kv_blocks"]
    assert (account.granted, account.consumed, account.returned) == (8, 4, 4)


def test_an_old_report_binds_nobody() -> None:
    tell = Told()
    tell(ev.StepReported(ME, 0.02, 0, 16))
    assert tell.ask("t", 1, kv_tokens=64) == []
    assert len(tell.after(ROOM_STALE_S)) == 1


def test_kv_credit_can_be_switched_off() -> None:
    tell = Told(kv_block_credit=False)
    tell(ev.StepReported(ME, 0.02, 0, 16))
    assert len(tell.ask("t", 1, kv_tokens=64)) == 1


def test_a_client_holds_no_more_than_its_share_and_stops_nobody_else() -> None:
    tell = Told(client_share=0.5)
    tell(ev.OpenSink(ME, flow("a", 1), 16 * SLOT_BYTES, "m", 100, 50))
    assert not tell(ev.OpenSink(ME, flow("b", 1), SLOT_BYTES, "m", 100, 50))
    (opened,) = tell(ev.OpenSink(OTHER, flow("c", 1), 16 * SLOT_BYTES, "m", 100, 50))
    assert isinstance(opened, ev.SinkOpened)
    (refused,) = tell(ev.OpenSink(OTHER, flow("d", 1), 17 * SLOT_BYTES, "m", 100, 50))
    assert isinstance(refused, ev.SinkEnded)
    assert refused.fault is not None
    assert refused.fault.code == "invalid_request"


def sealed(tell: Told, name: str, chunks: int) -> None:
    key = flow(name, 1)
    tell(ev.OpenSink(ME, key, chunks * SLOT_BYTES, "m", 100, 50))
    tell(ev.ChunksFilled(ME, key, tuple(range(chunks))))
    tell(ev.SealSink(ME, key))


def test_a_retained_flow_goes_the_moment_its_slots_are_needed_the_least_recently_wanted_first() -> None:
    tell = Told(retain_bytes=20 * SLOT_BYTES)
    for name in ("x", "y"):
        sealed(tell, name, 10)
        tell(ev.PullReceived(LANE, flow(name, 1), 1))
        tell(ev.AbortReceived(LANE, flow(name, 1), 1, LOST))
    assert tell.core.stats().slots["retained"] == 20
    assert tell.core.stats().at_rest
    sealed(tell, "z", 20)
    assert tell.core.stats().slots["retained"] == 10
    (gone,) = tell(ev.PullReceived(ELSEWHERE, flow("x", 1), 2))
    assert isinstance(gone, ev.SendAbort)
    (kept,) = tell(ev.PullReceived(ELSEWHERE, flow("y", 1), 2))
    assert isinstance(kept, ev.SendOpened)


def test_an_earlier_destination_is_refused_after_a_later_one_has_taken_over() -> None:
    tell = Told()
    sealed(tell, "t", 2)
    key = flow("t", 1)
    tell(ev.PullReceived(LANE, key, 1))
    told = tell(ev.PullReceived(ELSEWHERE, key, 2))
    assert [type(effect).__name__ for effect in told] == ["SendAbort", "SendOpened"]
    late: list[Event] = [
        ev.CreditReceived(LANE, key, 1, (Grant(0, SlotUse(0, 1)),)),
        ev.DoneReceived(LANE, key, 1),
        ev.AbortReceived(LANE, key, 1, LOST),
    ]
    for event in late:
        assert tell(event) == []
    (refused,) = tell(ev.PullReceived(LANE, key, 1))
    assert isinstance(refused, ev.SendAbort)
    assert refused.fault.code == "stale_party"
    assert [type(e) for e in tell(ev.CreditReceived(ELSEWHERE, key, 2, (Grant(0, SlotUse(0, 1)),)))] == [ev.SendChunk]


def test_a_chunk_on_its_way_to_the_old_destination_leaves_before_it_goes_to_the_new_one() -> None:
    tell = Told()
    sealed(tell, "t", 1)
    key = flow("t", 1)
    tell(ev.PullReceived(LANE, key, 1))
    (old,) = tell(ev.CreditReceived(LANE, key, 1, (Grant(0, SlotUse(9, 1)),)))
    assert isinstance(old, ev.SendChunk)
    tell(ev.PullReceived(ELSEWHERE, key, 2))
    assert tell(ev.CreditReceived(ELSEWHERE, key, 2, (Grant(0, SlotUse(5, 1)),))) == []
    assert tell(ev.RevokeReceived(LANE, key, 1, LOST)) == [], "not quiet yet"
    effects = tell(ev.ChunkSent(LANE, key, 0, old.out_of, ok=True))
    assert [type(effect).__name__ for effect in effects] == ["SendQuiet", "SendChunk"]


def test_feedback_slows_a_lane_down_and_the_planners_word_is_its_ceiling() -> None:
    tell = Told()
    tell(ev.RatesSet(None, ((Incarnation("b"), 1000.0),), 60.0))
    assert [lane.rate_bytes_per_s for lane in tell.core.stats().by_lane] == [1000.0, float("inf")]
    tell(ev.FeedbackReceived(LANE, 0.03, 0.02))
    assert tell.core.stats().by_lane[0].rate_bytes_per_s == pytest.approx(700.0)
    tell.now_s = 60.0
    tell(ev.Tick())
    assert tell.core.stats().by_lane[0].rate_bytes_per_s > 700.0


def test_those_who_send_to_a_slow_consumer_are_told_and_nobody_else() -> None:
    tell = Told()
    tell.ask("t", 2)
    (told,) = tell(ev.ItlReported(ME, 0.03, 0.02))
    assert told == ev.SendFeedback(LANE, 0.03, 0.02)
    assert tell(ev.ItlReported(ME, 0.03, 0.02)) == [], "not twice within a moment"
    assert tell(ev.ItlReported(OTHER, 0.03, 0.02)) == []


def test_a_late_word_of_an_earlier_attempt_is_refused_on_the_same_lane_too() -> None:
    tell = Told()
    sealed(tell, "t", 2)
    key = flow("t", 1)
    tell(ev.PullReceived(LANE, key, 1))
    tell(ev.PullReceived(LANE, key, 2))
    before = tell.core.stats().stale
    assert tell(ev.CreditReceived(LANE, key, 1, (Grant(0, SlotUse(0, 1)),))) == []
    assert tell(ev.AbortReceived(LANE, key, 1, LOST)) == []
    assert tell.core.stats().stale == before + 2
    assert [type(e) for e in tell(ev.CreditReceived(LANE, key, 2, (Grant(0, SlotUse(0, 1)),)))] == [ev.SendChunk]
