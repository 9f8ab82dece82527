"""What became of requests, kept until the planners are told: a beat later, or once there are enough for a message."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from isthmus_ingress.driver import RunningSaga
from isthmus_shared.bus.port import Bus
from isthmus_shared.errors import BusDisconnected, PayloadTooLarge
from isthmus_shared.ids import Incarnation, IngressId
from isthmus_shared.messages import subjects
from isthmus_shared.messages.outcomes import MAX_OUTCOMES, Outcome, Outcomes

PER_MESSAGE = min(32, MAX_OUTCOMES)
"""Some 10 kB. To make or to read so many takes 0.5 ms, in which no ingress streams and no planner chooses."""
MAX_WAITING = 8 * MAX_OUTCOMES
"""Beyond it the oldest are dropped: planners have less to learn from, nothing else. 16,000 ends a second at the default
beat, or a minute without a bus at 130 a second."""


class OutcomeLog:
    def __init__(self) -> None:
        self._waiting: deque[Outcome] = deque(maxlen=MAX_WAITING)
        self.enough = asyncio.Event()
        """Set while there is a message's worth."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, outcome: Outcome) -> None:
        self._waiting.append(outcome)
        self._look()

    def take(self) -> tuple[Outcome, ...]:
        """As many as fit into a message, oldest first."""
        taken = tuple(self._waiting.popleft() for _ in range(min(PER_MESSAGE, len(self._waiting))))
        self._look()
        return taken

    def put_back(self, outcomes: tuple[Outcome, ...]) -> None:
        """What could not be told now; the oldest of it goes first where there is no room."""
        room = MAX_WAITING - len(self._waiting)
        self._waiting.extendleft(reversed(outcomes[max(0, len(outcomes) - room) :]))
        self._look()

    def _look(self) -> None:
        if len(self._waiting) < PER_MESSAGE:
            self.enough.clear()
        else:
            self.enough.set()


def outcome_of(saga: RunningSaga, now_s: float) -> Outcome:
    """Of a saga that has just ended."""
    work, route, end = saga.work, saga.route, saga.ended
    tokens, first_s, last_s = len(saga.saga.output), saga.ledger.first_s, saga.ledger.last_s
    finish = "" if end is None else end.error.code if end.error is not None else (end.finish or "")
    return Outcome(
        request_id=work.request_id,
        model=work.model,
        tenant=work.tenant,
        slo_class="" if work.slo is None else work.slo.name,
        mode=None if route is None else route.mode,
        prefill=None if route is None else route.prefill,
        decode=None if route is None else route.decode,
        isl_tokens=len(work.prompt),
        osl_tokens=tokens,
        cached_tokens=saga.cached_tokens,
        queued_s=max(0.0, (now_s if saga.routed_s is None else saga.routed_s) - saga.begun_s),
        ttft_s=None if first_s is None else first_s - saga.begun_s,
        itl_s=None if first_s is None or last_s is None or tokens < 2 else (last_s - first_s) / (tokens - 1),
        e2el_s=now_s - saga.begun_s,
        predicted=None if route is None else route.predicted,
        attempts=saga.saga.attempts,
        finish=finish,
    )


async def tell(bus: Bus, log: OutcomeLog, ingress_id: IngressId, life: Incarnation, interval_s: float) -> None:
    """Until cancelled. What the bus did not take waits for the next beat, within the log's bound."""
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await log.enough.wait()
        while outcomes := log.take():
            try:
                await _publish(bus, Outcomes(ingress_id=ingress_id, ingress=life, outcomes=outcomes))
            except BusDisconnected:
                log.put_back(outcomes)
                await asyncio.sleep(interval_s)
                break
            if not log.enough.is_set():
                break  # what has ended meanwhile waits for more, or for the beat
            await asyncio.sleep(0)  # between two of many, streams go on


async def _publish(bus: Bus, message: Outcomes) -> None:
    """In parts, where it is too large for this bus; one outcome that is too large alone is left out."""
    try:
        await bus.publish(subjects.OUTCOMES, message.encode())
    except PayloadTooLarge:
        middle = len(message.outcomes) // 2
        for part in (message.outcomes[:middle], message.outcomes[middle:]) if middle else ():
            await _publish(bus, message.model_copy(update={"outcomes": part}))
