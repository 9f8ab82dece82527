"""What the worker tells its relay of the engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import structlog

from isthmus_shared.engines.port import EngineInfo, StepReport
from isthmus_testing.worker_parts import ToldEngine, ToldLink
from isthmus_worker.attachment import Attachment
from isthmus_worker.pace import ITL_RESET_S, ITL_SHARE, Pace

INFO = EngineInfo("demo", "f", 100, "NHD", 10, 16)
STEP = StepReport((), 0.02, prefill_tokens=0, decode_sequences=3)


@pytest.fixture
async def link() -> ToldLink:
    return ToldLink()


@pytest.fixture
async def pace(link: ToldLink):  # type: ignore[no-untyped-def]
    async def connect() -> ToldLink:
        return link

    async def nothing(*_: object) -> None:
        return

    attachment = Attachment(connect, structlog.get_logger())
    async with asyncio.TaskGroup() as group:
        task = group.create_task(attachment.run(nothing, nothing))
        await attachment.attached.wait()
        yield Pace(ToldEngine(), attachment, itl_target_s=0.03)
        task.cancel()


async def test_each_decode_step_tells_its_time_and_the_free_blocks(pace: Pace, link: ToldLink) -> None:
    pace.step(STEP, INFO, now_s=1.0)
    assert link.steps == [(0.02, 10, 16)]
    pace.step(replace(STEP, decode_sequences=0), INFO, now_s=1.1)
    assert len(link.steps) == 1, "a prefill step is no decode step"


async def test_the_interval_between_steps_is_the_latency_that_is_told_smoothed(pace: Pace, link: ToldLink) -> None:
    for now_s in (1.0, 1.04, 1.14):
        pace.step(STEP, INFO, now_s=now_s)
    told = [itl for itl, _ in link.itls]
    assert told == pytest.approx([40.0, 40.0 + ITL_SHARE * 60.0])
    assert {target for _, target in link.itls} == {30.0}


async def test_a_pause_is_no_latency(pace: Pace, link: ToldLink) -> None:
    pace.step(STEP, INFO, now_s=1.0)
    pace.step(STEP, INFO, now_s=2.0 + ITL_RESET_S)
    assert link.itls == []


async def test_room_is_told_between_steps_too_but_not_before_the_first(pace: Pace, link: ToldLink) -> None:
    pace.room(INFO)
    assert link.steps == []
    pace.step(STEP, INFO, now_s=1.0)
    pace.room(INFO)
    assert len(link.steps) == 2
