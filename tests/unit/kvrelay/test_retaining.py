"""What was fetched, or given up, may be fetched again with a higher pull, for as long as its producer said."""

from __future__ import annotations

import pytest

from isthmus_kvrelay.core import events as ev
from isthmus_kvrelay.core.events import ClientId, Effect, Event
from isthmus_kvrelay.core.names import LaneId
from isthmus_kvrelay.core.relay import RelayCore
from isthmus_kvrelay.core.settings import RelaySettings
from isthmus_shared.errors import Cancelled
from isthmus_shared.ids import Incarnation
from isthmus_testing.relay_world import SLOT_BYTES, flow

PRODUCER, CONSUMER, OTHER = ClientId(1), ClientId(2), ClientId(3)
HOME, KEY = Incarnation("a"), flow("t", 1)
DEADLINE_S, RETAIN_S = 10.0, 50.0


class Told:
    """A sealed flow waits."""

    def __init__(self, *, retain_s: float = RETAIN_S) -> None:
        settings = RelaySettings(
            incarnation=HOME, slot_bytes=SLOT_BYTES, total_slots=8, out_share=0.5, retain_bytes=4 * SLOT_BYTES
        )
        self.core = RelayCore(settings)
        for client in (PRODUCER, CONSUMER, OTHER):
            self(ev.ClientUp(client))
        self(ev.OpenSink(PRODUCER, KEY, 2 * SLOT_BYTES, "m", DEADLINE_S, 5, retain_s))
        self(ev.ChunksFilled(PRODUCER, KEY, (0, 1)))
        self(ev.SealSink(PRODUCER, KEY))

    def __call__(self, event: Event, *, at_s: float = 0.0) -> list[Effect]:
        effects = self.core.handle(event, now_s=at_s)
        self.core.check_invariants()
        return effects

    def fetch(self, client: ClientId, pull: int, *, at_s: float = 0.0) -> str:
        answers = self(ev.OpenSource(client, KEY, HOME, "here", 2 * SLOT_BYTES, "m", DEADLINE_S, pull), at_s=at_s)
        (answer,) = (each for each in answers if isinstance(each, ev.SourceReady | ev.SourceFailed))
        return type(answer).__name__


@pytest.mark.parametrize("consumed", [True, False])
def test_another_fetches_what_was_fetched_or_given_up(consumed: bool) -> None:
    tell = Told()
    assert tell.fetch(CONSUMER, 1) == "SourceReady"
    tell(ev.ReleaseSource(CONSUMER, KEY, consumed))
    assert tell.fetch(OTHER, 1) == "SourceFailed", "a late attempt of before gets nothing"
    assert tell.fetch(OTHER, 2) == "SourceReady"


def test_a_consumer_on_another_node_that_gives_up_leaves_it_to_the_next() -> None:
    tell, lane = Told(), LaneId(1)
    tell(ev.LaneUp(lane, Incarnation("b")))
    tell(ev.PullReceived(lane, KEY, 1))
    tell(ev.AbortReceived(lane, KEY, 1, Cancelled("replanned").to_fault()))
    assert tell.fetch(OTHER, 2) == "SourceReady"


def test_it_is_kept_beyond_the_transfers_deadline_and_no_longer_than_its_producer_said() -> None:
    tell = Told()
    assert tell.fetch(CONSUMER, 1) == "SourceReady"
    tell(ev.ReleaseSource(CONSUMER, KEY, True))
    tell(ev.Tick(), at_s=DEADLINE_S + 1)
    assert tell.fetch(OTHER, 2, at_s=RETAIN_S - 1) == "SourceReady"
    tell(ev.ReleaseSource(OTHER, KEY, True), at_s=RETAIN_S - 1)
    tell(ev.Tick(), at_s=RETAIN_S)
    assert tell.fetch(CONSUMER, 3, at_s=RETAIN_S) == "SourceFailed"
    assert tell.core.stats().at_rest


def test_without_a_word_of_its_producer_it_is_kept_until_its_deadline() -> None:
    tell = Told(retain_s=0.0)
    assert tell.fetch(CONSUMER, 1) == "SourceReady"
    tell(ev.ReleaseSource(CONSUMER, KEY, True))
    tell(ev.Tick(), at_s=DEADLINE_S)
    assert tell.fetch(OTHER, 2, at_s=DEADLINE_S) == "SourceFailed"


def test_what_was_never_fetched_is_not_kept_longer_than_its_deadline() -> None:
    tell = Told()
    tell(ev.Tick(), at_s=DEADLINE_S)
    assert tell.fetch(CONSUMER, 1, at_s=DEADLINE_S) == "SourceFailed"
    assert tell.core.stats().at_rest


def test_its_producer_ends_it_at_any_time() -> None:
    tell = Told()
    assert tell.fetch(CONSUMER, 1) == "SourceReady"
    tell(ev.ReleaseSource(CONSUMER, KEY, True))
    tell(ev.AbortByClient(PRODUCER, KEY, Cancelled("the request is over").to_fault()))
    assert tell.fetch(OTHER, 2) == "SourceFailed"
    assert tell.core.stats().at_rest


def test_it_outlives_its_producer() -> None:
    tell = Told()
    assert tell.fetch(CONSUMER, 1) == "SourceReady"
    tell(ev.ReleaseSource(CONSUMER, KEY, True))
    tell(ev.ClientDown(PRODUCER))
    assert tell.fetch(OTHER, 2) == "SourceReady"
