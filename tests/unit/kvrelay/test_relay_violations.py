"""What a core does about a peer or a client that breaks the rules: the guilty one is closed, nobody else is hurt."""

from __future__ import annotations

import pytest

from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import ClientId, Effect, Event, Grant, LaneId, SlotUse
from isthmus_kvrelay.core.quarantine import QUIET_TIMEOUT_S
from isthmus_kvrelay.core.relay import RelayCore
from isthmus_kvrelay.core.settings import RelaySettings
from isthmus_shared.errors import Cancelled
from isthmus_shared.ids import Incarnation
from isthmus_testing.relay_world import SLOT_BYTES, flow

ME, OTHER, LANE, ELSEWHERE = ClientId(1), ClientId(2), LaneId(1), LaneId(2)
KEY = flow("t", 2)
FAULT = Cancelled("x").to_fault()


class Told:
    """A core and a clock."""

    def __init__(self) -> None:
        settings = RelaySettings(incarnation=Incarnation("a"), slot_bytes=SLOT_BYTES, total_slots=8, out_share=0.5)
        self.core, self.now_s = RelayCore(settings), 0.0
        for event in (ev.ClientUp(ME), ev.ClientUp(OTHER), ev.LaneUp(LANE, Incarnation("b"))):
            self(event)
        self(ev.LaneUp(ELSEWHERE, Incarnation("c")))

    def __call__(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, now_s=self.now_s)
        self.core.check_invariants()
        return effects

    def open_sink(self, chunks: int = 2) -> None:
        self(ev.OpenSink(ME, KEY, chunks * SLOT_BYTES, "m", deadline_s=10, wait_s=1))

    def open_source(self) -> tuple[SlotUse, ...]:
        """Up to granted credit; returns the landing slots."""
        self(ev.OpenSource(ME, KEY, Incarnation("b"), "b", 2 * SLOT_BYTES, "m", 10))
        effects = self(ev.OpenedReceived(LANE, KEY, 1, 2 * SLOT_BYTES, SLOT_BYTES, "m"))
        (credit,) = [effect for effect in effects if isinstance(effect, ev.SendCredit)]
        return tuple(grant.into for grant in credit.grants)


@pytest.fixture
def tell() -> Told:
    return Told()


def kinds(effects: list[Effect]) -> set[str]:
    return {type(effect).__name__ for effect in effects}


@pytest.mark.parametrize("chunks", [(0, 0), (5,), (-1,)])
def test_chunks_filled_twice_or_beyond_the_end_close_the_client(tell: Told, chunks: tuple[int, ...]) -> None:
    tell.open_sink()
    assert kinds(tell(ev.ChunksFilled(ME, KEY, chunks))) == {"CloseClient"}


def test_a_chunk_filled_again_closes_the_client(tell: Told) -> None:
    tell.open_sink()
    tell(ev.ChunksFilled(ME, KEY, (0,)))
    assert kinds(tell(ev.ChunksFilled(ME, KEY, (0,)))) == {"CloseClient"}


def test_sealing_too_early_closes_the_client(tell: Told) -> None:
    tell.open_sink()
    tell(ev.ChunksFilled(ME, KEY, (0,)))
    assert kinds(tell(ev.SealSink(ME, KEY))) == {"CloseClient"}


def test_another_clients_flow_is_out_of_reach(tell: Told) -> None:
    tell.open_sink()
    for event in (ev.ChunksFilled(OTHER, KEY, (0,)), ev.SealSink(OTHER, KEY), ev.AbortByClient(OTHER, KEY, FAULT)):
        assert tell(event) == []
    assert tell(ev.ReleaseSource(OTHER, KEY)) == []
    assert tell.core.stats().flows_out == 1


def test_a_second_consumer_is_refused_and_the_first_keeps_the_flow(tell: Told) -> None:
    tell.open_sink()
    assert kinds(tell(ev.PullReceived(LANE, KEY, 1))) == {"SendOpened"}
    (refusal,) = tell(ev.PullReceived(ELSEWHERE, KEY, 1))
    assert isinstance(refusal, ev.SendAbort)
    assert refusal.lane == ELSEWHERE
    for event in (
        ev.CreditReceived(ELSEWHERE, KEY, 1, (Grant(0, SlotUse(0, 1)),)),
        ev.DoneReceived(ELSEWHERE, KEY, 1),
        ev.AbortReceived(ELSEWHERE, KEY, 1, FAULT),
    ):
        assert tell(event) == []
    assert tell.core.stats().flows_out == 1


def test_credit_beyond_the_end_closes_the_lane(tell: Told) -> None:
    tell.open_sink()
    tell(ev.PullReceived(LANE, KEY, 1))
    assert kinds(tell(ev.CreditReceived(LANE, KEY, 1, (Grant(2, SlotUse(0, 1)),)))) == {"CloseLane"}


def test_credit_given_twice_is_spent_once(tell: Told) -> None:
    tell.open_sink()
    tell(ev.ChunksFilled(ME, KEY, (0, 1)))
    tell(ev.PullReceived(LANE, KEY, 1))
    grants = (Grant(0, SlotUse(0, 1)),)
    assert kinds(tell(ev.CreditReceived(LANE, KEY, 1, grants))) == {"SendChunk"}
    assert tell(ev.CreditReceived(LANE, KEY, 1, grants)) == []


def test_an_acknowledgement_before_all_is_sent_closes_the_lane(tell: Told) -> None:
    tell.open_sink()
    tell(ev.ChunksFilled(ME, KEY, (0, 1)))
    tell(ev.PullReceived(LANE, KEY, 1))
    tell(ev.CreditReceived(LANE, KEY, 1, (Grant(0, SlotUse(0, 1)),)))
    assert kinds(tell(ev.DoneReceived(LANE, KEY, 1))) == {"CloseLane"}


def test_a_chunk_that_was_never_granted_is_stale(tell: Told) -> None:
    tell.open_source()
    before = tell.core.stats().stale
    assert tell(ev.ChunkLanded(LANE, KEY, 0, SlotUse(7, 9), intact=True)) == []
    assert tell.core.stats().stale == before + 1


def test_a_chunk_that_lands_twice_counts_once(tell: Told) -> None:
    first, second = tell.open_source()
    assert tell(ev.ChunkLanded(LANE, KEY, 0, first, intact=True)) == []
    assert tell(ev.ChunkLanded(LANE, KEY, 0, first, intact=True)) == []
    assert kinds(tell(ev.ChunkLanded(LANE, KEY, 1, second, intact=True))) == {"SourceReady"}


def test_a_damaged_chunk_fails_the_flow_and_its_slots_wait_for_the_receiver(tell: Told) -> None:
    first, second = tell.open_source()
    effects = tell(ev.ChunkLanded(LANE, KEY, 0, first, intact=False))
    assert kinds(effects) == {"RevokeFlow", "SendRevoke", "SourceFailed", "FlowClosed"}
    assert tell.core.stats().slots["quarantined"] == 2
    tell(ev.SlotQuiet(second))
    assert tell.core.stats().slots["quarantined"] == 2, "the sender has not said yet that it is quiet"
    tell(ev.QuietReceived(LANE, KEY, 1))
    assert tell.core.stats().at_rest


def test_a_quiet_word_before_this_ends_receive_is_over_frees_nothing(tell: Told) -> None:
    tell.open_source()
    tell(ev.ReleaseSource(ME, KEY))
    tell(ev.QuietReceived(LANE, KEY, 1))
    assert tell.core.stats().slots["quarantined"] == 2


def test_a_sender_that_never_says_it_is_quiet_loses_its_lane(tell: Told) -> None:
    first, second = tell.open_source()
    tell(ev.ReleaseSource(ME, KEY))
    for ref in (first, second):
        tell(ev.SlotQuiet(ref))
    tell.now_s += QUIET_TIMEOUT_S
    assert kinds(tell(ev.Tick())) == {"CloseLane"}
    tell(ev.LaneDown(LANE, FAULT))
    assert tell.core.stats().at_rest


@pytest.mark.parametrize("chunk_bytes", [0, SLOT_BYTES + 1])
def test_chunks_that_do_not_fit_a_slot_are_refused_by_name(tell: Told, chunk_bytes: int) -> None:
    tell(ev.OpenSource(ME, KEY, Incarnation("b"), "b", SLOT_BYTES, "m", 10))
    effects = tell(ev.OpenedReceived(LANE, KEY, 1, SLOT_BYTES, chunk_bytes, "m"))
    (failed,) = [effect for effect in effects if isinstance(effect, ev.SourceFailed)]
    assert failed.fault.code == "manifest_mismatch"


def test_smaller_chunks_than_this_relays_slots_are_taken(tell: Told) -> None:
    tell(ev.OpenSource(ME, KEY, Incarnation("b"), "b", SLOT_BYTES, "m", 10))
    effects = tell(ev.OpenedReceived(LANE, KEY, 1, SLOT_BYTES, SLOT_BYTES // 2, "m"))
    assert len([effect for effect in effects if isinstance(effect, ev.ExpectChunk)]) == 2


def test_a_flow_that_can_never_land_is_refused_rather_than_left_waiting(tell: Told) -> None:
    size = 5 * SLOT_BYTES
    tell(ev.OpenSource(ME, KEY, Incarnation("b"), "b", size, "m", 10))
    effects = tell(ev.OpenedReceived(LANE, KEY, 1, size, SLOT_BYTES, "m"))
    assert kinds(effects) == {"SourceFailed", "SendAbort", "FlowClosed"}


def test_an_old_generation_is_refused_before_anything_is_reserved(tell: Told) -> None:
    tell.open_sink()
    effects = tell(ev.OpenSink(OTHER, flow("t", 1), SLOT_BYTES, "m", 10, 1))
    (refusal,) = effects
    assert isinstance(refusal, ev.SinkEnded)
    assert refusal.fault is not None
    assert refusal.fault.code == "stale_party"
    assert tell.core.stats().flows_out == 1
