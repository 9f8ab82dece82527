"""Both ends of a flow at one relay: the consumer holds the producer's slots from the moment that it is told them."""

from __future__ import annotations

import pytest

from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import ClientId, Effect, Event
from isthmus_kvrelay.core.relay import RelayCore
from isthmus_kvrelay.core.settings import RelaySettings
from isthmus_shared.errors import Cancelled
from isthmus_shared.ids import Incarnation
from isthmus_testing.relay_world import SLOT_BYTES, flow

PRODUCER, CONSUMER = ClientId(1), ClientId(2)
HOME, KEY = Incarnation("a"), flow("t", 1)
FAULT = Cancelled("x").to_fault()


class Told:
    def __init__(self) -> None:
        self.core = RelayCore(RelaySettings(incarnation=HOME, slot_bytes=SLOT_BYTES, total_slots=8, out_share=0.5))
        for event in (ev.ClientUp(PRODUCER), ev.ClientUp(CONSUMER)):
            self(event)

    def __call__(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, now_s=0.0)
        self.core.check_invariants()
        return effects

    def open_sink(self) -> list[Effect]:
        return self(ev.OpenSink(PRODUCER, KEY, 2 * SLOT_BYTES, "m", 10, 5))

    def open_source(self) -> list[Effect]:
        return self(ev.OpenSource(CONSUMER, KEY, HOME, "here", 2 * SLOT_BYTES, "m", 10))

    def fill(self) -> list[Effect]:
        return self(ev.ChunksFilled(PRODUCER, KEY, (0, 1)))

    def quarantined(self) -> int:
        return self.core.stats().slots["quarantined"]


@pytest.fixture
def tell() -> Told:
    return Told()


def names(effects: list[Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def test_both_ends_are_told_once_whichever_comes_first(tell: Told) -> None:
    (opened,) = tell.open_sink()
    assert isinstance(opened, ev.SinkOpened)
    (attached,) = tell.open_source()
    assert attached == ev.Attached(PRODUCER, CONSUMER, KEY, 1, opened.slots, SLOT_BYTES)
    assert names(tell.fill()) == ["SourceReady"]


def test_who_asks_after_all_is_filled_is_told_that(tell: Told) -> None:
    tell.open_sink()
    tell.fill()
    assert names(tell.open_source()) == ["SourceReady"]


def test_slots_that_a_consumer_was_told_stay_out_of_use_until_it_lets_go(tell: Told) -> None:
    tell.open_sink()
    tell.open_source()
    tell(ev.AbortByClient(PRODUCER, KEY, FAULT))
    tell(ev.SinkQuiet(PRODUCER, KEY))
    assert tell.quarantined() == 2, "the producer may have told it that all is filled"
    tell(ev.ReleaseSource(CONSUMER, KEY, consumed=True))
    assert tell.core.stats().at_rest


def test_a_consumers_death_lets_go_of_them(tell: Told) -> None:
    tell.open_sink()
    tell.open_source()
    tell(ev.AbortByClient(PRODUCER, KEY, FAULT))
    tell(ev.SinkQuiet(PRODUCER, KEY))
    tell(ev.ClientDown(CONSUMER))
    assert tell.core.stats().at_rest


def test_a_consumer_that_is_done_before_the_producers_word_is_read_counts_as_served(tell: Told) -> None:
    tell.open_sink()
    tell.open_source()
    assert tell(ev.ReleaseSource(CONSUMER, KEY, consumed=True)) == []
    assert tell.core.stats().flows_in == 1
    told = tell.fill()
    assert "SourceReady" not in names(told)
    ended = [effect for effect in told if isinstance(effect, ev.FlowClosed)]
    assert [(each.side.value, each.fault) for each in ended] == [("in", None), ("out", None)]


def test_a_producer_that_dies_before_its_word_is_read_fails_the_flow_and_leaks_nothing(tell: Told) -> None:
    tell.open_sink()
    tell.open_source()
    tell(ev.ReleaseSource(CONSUMER, KEY, consumed=True))
    tell(ev.ClientDown(PRODUCER))
    assert tell.core.stats().at_rest
    assert tell.core.stats().failures == {"party_lost": 2}


def test_a_consumer_that_gives_up_is_not_taken_for_one_that_was_served(tell: Told) -> None:
    tell.open_sink()
    tell.open_source()
    told = tell(ev.ReleaseSource(CONSUMER, KEY))
    assert [each.fault.code for each in told if isinstance(each, ev.FlowClosed) and each.fault] == ["cancelled"] * 2


def test_a_seal_of_a_flow_that_has_ended_meanwhile_lets_its_slots_go(tell: Told) -> None:
    """Its producer has sealed and says nothing more, while the relay had not read that yet when the flow ended."""
    tell.open_sink()
    tell.open_source()
    tell(ev.AbortByClient(CONSUMER, KEY, FAULT))
    tell(ev.ReleaseSource(CONSUMER, KEY, False))
    tell.fill()
    assert tell.quarantined() == 2
    tell(ev.SealSink(PRODUCER, KEY))
    assert tell.core.stats().at_rest
