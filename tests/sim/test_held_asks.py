"""Asks that are held: answered when they go, told that they are in line when their patience is over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from isthmus_planner.admission.control import Admission, AdmissionSettings, Decision, Go, Refuse, Wait
from isthmus_planner.admission.holding import Holding
from isthmus_planner.routing.types import Choice
from isthmus_shared.ids import RequestId
from isthmus_shared.messages.route import Mode, Prediction, RouteRequest, Slo
from isthmus_shared.simloop import run_simulated

SLO = Slo(name="chat", ttft_s=5.0, itl_s=0.05)
PREDICTED = Prediction(ttft_p50_s=0.1, ttft_p90_s=0.1, itl_p50_s=0.01, itl_p90_s=0.01, calibrated=True)


def request(name: str, **others: object) -> RouteRequest:
    made = RouteRequest(
        request_id=RequestId(name), model="m", isl_tokens=10, max_osl_tokens=10, slo=SLO, patience_s=1.0
    )
    return made.model_copy(update=others)


class Desk:
    """A desk whose workers have room for so many."""

    def __init__(self) -> None:
        self.admission, self.room = Admission(AdmissionSettings()), 0

    def offer(self, asked: RouteRequest, now_s: float) -> Decision:
        return self._took(self.admission.offer(asked, self._choose, now_s))

    def release(self, now_s: float) -> Iterator[tuple[RouteRequest, Decision]]:
        for asked, decision in self.admission.release(self._choose, now_s):
            yield asked, self._took(decision)

    def _took(self, decision: Decision) -> Decision:
        self.room -= isinstance(decision, Go)
        return decision

    def _choose(self, asked: RouteRequest) -> Choice:
        return Choice(
            request=asked,
            mode=Mode.AGGREGATED,
            prefill=None,
            decode=None,  # type: ignore[arg-type]  # nobody looks at it here
            predicted=PREDICTED,
            deadlines=None,  # type: ignore[arg-type]
            score_s=0.0,
            planner="p",  # type: ignore[arg-type]
            room=self.room > 0,
            predicted_wait_s=0.5,
        )


class Bench:
    def __init__(self) -> None:
        self.desk, self.refused = Desk(), []
        self.holding = Holding(self.desk)  # type: ignore[arg-type]

    async def ask(self, asked: RouteRequest) -> Decision:
        decision = self.holding.offer(asked)
        return await self.holding.wait(asked) if isinstance(decision, Wait) else decision


def simulated(story) -> None:  # type: ignore[no-untyped-def]
    async def main() -> None:
        bench = Bench()
        running = asyncio.create_task(bench.holding.run(lambda asked, _: bench.refused.append(asked.request_id)))
        await story(bench)
        running.cancel()

    run_simulated(main())


def test_an_ask_is_answered_when_there_is_room() -> None:
    async def story(bench: Bench) -> None:
        asked = asyncio.create_task(bench.ask(request("a")))
        await asyncio.sleep(0.3)
        assert not asked.done()
        bench.desk.room = 1
        assert isinstance(await asked, Go)
        assert bench.desk.room == 0

    simulated(story)


def test_after_its_patience_it_is_told_its_place_and_keeps_it_while_it_asks_again() -> None:
    async def story(bench: Bench) -> None:
        first, second = (asyncio.create_task(bench.ask(request(name))) for name in "ab")
        told = await first, await second
        assert [type(each) for each in told] == [Wait, Wait]
        assert [each.position for each in told if isinstance(each, Wait)] == [0, 1]
        bench.desk.room = 1
        await asyncio.sleep(0.2)
        assert bench.desk.room == 1, "nobody goes while nobody is there to hear of it"
        later, earlier = (asyncio.create_task(bench.ask(request(name, waited_s=1.2))) for name in "ba")
        assert isinstance(await earlier, Go)
        assert isinstance(await later, Wait)

    simulated(story)


def test_one_who_asks_twice_at_once_is_answered_once_by_a_route() -> None:
    async def story(bench: Bench) -> None:
        first = asyncio.create_task(bench.ask(request("a")))
        await asyncio.sleep(0.12)  # between two looks at the line
        again = asyncio.create_task(bench.ask(request("a", waited_s=0.1)))
        bench.desk.room = 5
        assert isinstance(await first, Wait)
        assert isinstance(await again, Go)
        assert bench.desk.room == 4

    simulated(story)


def test_whoever_waits_in_vain_is_refused_in_time() -> None:
    async def story(bench: Bench) -> None:
        decision: Decision = Wait(0, 0.0)
        begun_s = asyncio.get_running_loop().time()
        while isinstance(decision, Wait):
            waited_s = asyncio.get_running_loop().time() - begun_s
            decision = await bench.ask(request("a", waited_s=waited_s))
        assert isinstance(decision, Refuse)
        assert 4.5 <= asyncio.get_running_loop().time() - begun_s <= 5.0
        assert len(bench.desk.admission) == 0

    simulated(story)
