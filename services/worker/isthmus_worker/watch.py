"""What ends requests from the side of the clock: transfer deadlines and ingresses that went away."""

from __future__ import annotations

import asyncio

from isthmus_shared.errors import Fault, PartyLost
from isthmus_shared.messages.health import IngressHeartbeat
from isthmus_worker.sessions import DEADLINE, Sessions

SWEEP_S = 0.5
"""How often the ingresses' silence is looked at; a tenth of the silence that counts."""

INGRESS_LOST = Fault(
    code=PartyLost.code, what="the ingress of this request was lost", why="its heartbeats ended; nobody reads on"
)


async def enforce_deadlines(sessions: Sessions) -> None:
    """Fails each transfer when its deadline passes; sleeps until the next one."""
    loop = asyncio.get_running_loop()
    while True:
        sessions.deadlines_changed.clear()
        due = sessions.requests.due(loop.time())
        if due:
            await sessions.fail(due, DEADLINE)
            continue
        next_s = sessions.requests.next_deadline_s()
        try:
            async with asyncio.timeout_at(next_s):
                await sessions.deadlines_changed.wait()
        except TimeoutError:
            continue


async def ingress_beat(sessions: Sessions, beat: IngressHeartbeat) -> None:
    sessions.life.beat(beat.events_subject, asyncio.get_running_loop().time())


async def sweep_ingresses(sessions: Sessions, *, deaf: bool) -> None:
    """Ends what is held for ingresses that are gone."""
    now_s = asyncio.get_running_loop().time()
    gone = sessions.life.sweep(now_s, sessions.requests.subjects, deaf=deaf)
    if gone:
        await sessions.fail(sessions.requests.of_subjects(gone), INGRESS_LOST)
