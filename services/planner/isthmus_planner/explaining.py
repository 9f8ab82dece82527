"""Answers `isthmus explain`: every planner hears the question, and only those that know the request answer."""

from __future__ import annotations

import asyncio

from isthmus_planner.config import PlannerConfig
from isthmus_planner.routing.explain import Explanations
from isthmus_shared.bus.subscribing import subscribed
from isthmus_shared.bus.syntax import is_inbox
from isthmus_shared.errors import IsthmusError
from isthmus_shared.messages import subjects
from isthmus_shared.messages.outcomes import ExplainReply, ExplainRequest
from isthmus_shared.runtime import ServiceRuntime

MAX_PENDING = 64
"""Questions are people's; a burst beyond this may go unanswered."""


async def answer_explanations(runtime: ServiceRuntime[PlannerConfig], explanations: Explanations) -> None:
    """Until cancelled, over any outage of the bus."""
    loop = asyncio.get_running_loop()
    async with subscribed(runtime.bus, subjects.EXPLAIN, max_pending=MAX_PENDING) as questions:
        async for message in questions:
            try:
                request = ExplainRequest.decode(message.data)
                found = explanations.of(request.request_id, loop.time())
                if found and message.reply is not None and is_inbox(message.reply):
                    await runtime.bus.publish(message.reply, ExplainReply(explanations=found).encode())
            except IsthmusError as error:
                runtime.log.warning("explain.failed", code=error.code, why=error.text)
