from __future__ import annotations

import asyncio

import pytest

from isthmus_ingress.outcomes import MAX_WAITING, PER_MESSAGE, OutcomeLog, tell
from isthmus_shared.bus.memory import MemoryBroker
from isthmus_shared.ids import Incarnation, IngressId, RequestId
from isthmus_shared.messages import subjects
from isthmus_shared.messages.outcomes import Outcome, Outcomes


class WatchedLog(OutcomeLog):
    def __init__(self) -> None:
        super().__init__()
        self.refused = asyncio.Event()

    def put_back(self, outcomes: tuple[Outcome, ...]) -> None:
        super().put_back(outcomes)
        self.refused.set()


def outcome(number: int) -> Outcome:
    return Outcome(request_id=RequestId(f"r{number}"), model="m", isl_tokens=1, osl_tokens=1, e2el_s=1.0)


def names(outcomes: tuple[Outcome, ...]) -> list[str]:
    return [each.request_id for each in outcomes]


def test_outcomes_are_told_oldest_first_and_a_message_at_a_time() -> None:
    log = OutcomeLog()
    for number in range(PER_MESSAGE + 2):
        log.add(outcome(number))
    assert names(log.take())[:2] == ["r0", "r1"]
    assert names(log.take()) == [f"r{PER_MESSAGE}", f"r{PER_MESSAGE + 1}"]
    assert log.take() == ()


def test_without_a_reader_the_oldest_are_dropped() -> None:
    log = OutcomeLog()
    for number in range(MAX_WAITING + 3):
        log.add(outcome(number))
    assert len(log) == MAX_WAITING
    assert names(log.take())[0] == "r3"


@pytest.mark.parametrize("waiting", [1, MAX_WAITING - 1])
def test_what_could_not_be_told_goes_first_the_next_time_as_far_as_there_is_room(waiting: int) -> None:
    log = OutcomeLog()
    log.add(outcome(0))
    log.add(outcome(1))
    taken = log.take()
    for number in range(waiting):
        log.add(outcome(2 + number))
    log.put_back(taken)
    assert len(log) == min(MAX_WAITING, waiting + 2)
    assert names(log.take())[:2] == (["r0", "r1"] if waiting == 1 else ["r1", "r2"])


async def test_each_beat_tells_what_has_ended_and_a_broken_bus_loses_none() -> None:
    broker, log = MemoryBroker(), WatchedLog()
    sender, listener = broker.client(), broker.client()
    async with listener.subscribe(subjects.OUTCOMES) as heard, asyncio.TaskGroup() as tasks:
        for number in range(PER_MESSAGE + 1):
            log.add(outcome(number))
        sender.disconnect()
        task = tasks.create_task(tell(sender, log, IngressId("i"), Incarnation("life"), 0.01))
        async with asyncio.timeout(30):
            await log.refused.wait()
        sender.reconnect()
        got: list[str] = []
        async with asyncio.timeout(30):
            async for message in heard:
                told = Outcomes.decode(message.data)
                assert told.ingress == "life"
                got += names(told.outcomes)
                if len(got) > PER_MESSAGE:
                    break
        task.cancel()
    assert got == [f"r{number}" for number in range(PER_MESSAGE + 1)]


async def test_a_message_that_is_too_large_for_the_bus_is_told_in_parts() -> None:
    broker, log = MemoryBroker(max_payload_bytes=400), OutcomeLog()
    sender, listener = broker.client(), broker.client()
    async with listener.subscribe(subjects.OUTCOMES) as heard, asyncio.TaskGroup() as tasks:
        for number in range(9):
            log.add(outcome(number))
        task = tasks.create_task(tell(sender, log, IngressId("i"), Incarnation("life"), 0.01))
        got: list[str] = []
        async with asyncio.timeout(30):
            async for message in heard:
                got += names(Outcomes.decode(message.data).outcomes)
                if len(got) == 9:
                    break
        task.cancel()
    assert got == [f"r{number}" for number in range(9)]


async def test_enough_for_a_message_is_told_without_waiting_for_the_beat() -> None:
    broker, log = MemoryBroker(), OutcomeLog()
    sender, listener = broker.client(), broker.client()
    async with listener.subscribe(subjects.OUTCOMES) as heard, asyncio.TaskGroup() as tasks:
        task = tasks.create_task(tell(sender, log, IngressId("i"), Incarnation("life"), 3600.0))
        for number in range(2 * PER_MESSAGE):
            log.add(outcome(number))
        got: list[str] = []
        async with asyncio.timeout(30):
            async for message in heard:
                told = names(Outcomes.decode(message.data).outcomes)
                assert len(told) == PER_MESSAGE, "each is read in one go, between two routes"
                got += told
                if len(got) == 2 * PER_MESSAGE:
                    break
        task.cancel()
    assert got == [f"r{number}" for number in range(2 * PER_MESSAGE)]


def test_enough_is_said_as_long_as_there_is() -> None:
    log = OutcomeLog()
    for number in range(PER_MESSAGE):
        assert not log.enough.is_set()
        log.add(outcome(number))
    assert log.enough.is_set()
    taken = log.take()
    assert not log.enough.is_set()
    log.put_back(taken)
    assert log.enough.is_set()


async def test_what_ends_while_many_are_told_waits_for_more() -> None:
    """One ends each time the loop turns: told one by one they would be as many messages as requests."""
    broker, log = MemoryBroker(), OutcomeLog()
    sender, listener = broker.client(), broker.client()
    ended = 10 * PER_MESSAGE
    async with listener.subscribe(subjects.OUTCOMES) as heard, asyncio.TaskGroup() as tasks:
        task = tasks.create_task(tell(sender, log, IngressId("i"), Incarnation("life"), 3600.0))
        for number in range(ended):
            log.add(outcome(number))
            await asyncio.sleep(0)
        sizes: list[int] = []
        async with asyncio.timeout(30):
            async for message in heard:
                sizes.append(len(Outcomes.decode(message.data).outcomes))
                if sum(sizes) > ended - PER_MESSAGE:
                    break
        task.cancel()
    assert min(sizes) > PER_MESSAGE // 2
