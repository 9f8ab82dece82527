"""The asks that are held: each has a future until it goes, is refused, or its patience is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from isthmus_planner.admission.control import Decision, Refuse, Wait
from isthmus_planner.desk import Desk
from isthmus_shared.messages.route import RouteRequest

RELEASE_S = 0.05
"""Between two looks at who may go: a tenth of a heartbeat, which is how often anything is known to have changed."""


class Holding:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._held: dict[str, asyncio.Future[Decision]] = {}

    def offer(self, request: RouteRequest) -> Decision:
        """As `Desk.offer`; what has to wait is held from now on, for `wait` to be called."""
        decision = self._desk.offer(request, _now_s())
        self._drop(request.request_id)
        if isinstance(decision, Wait):
            self._held[request.request_id] = asyncio.get_running_loop().create_future()
        return decision

    async def wait(self, request: RouteRequest) -> Decision:
        """For the request's patience; a `Wait` after that."""
        future = self._held.get(request.request_id)
        if future is None:
            decision = self.offer(request)
            future = self._held.get(request.request_id)
            if future is None:
                return decision
        try:
            async with asyncio.timeout(request.patience_s):
                return await future
        except TimeoutError:
            return self._desk.admission.away(request.request_id) or Wait(0, 0.0)
        finally:
            if self._held.get(request.request_id) is future:
                del self._held[request.request_id]

    async def run(self, refused: Callable[[RouteRequest, Refuse], None]) -> None:
        """Until cancelled. `refused`: is told of those for whom nobody waits here any more."""
        while True:
            await asyncio.sleep(RELEASE_S)
            for request, decision in self._desk.release(_now_s()):
                future = self._held.get(request.request_id)
                if future is not None and not future.done():
                    future.set_result(decision)
                elif isinstance(decision, Refuse):
                    refused(request, decision)

    def _drop(self, request_id: str) -> None:
        """An earlier ask of the same request, whose asker has given it up."""
        earlier = self._held.pop(request_id, None)
        if earlier is not None and not earlier.done():
            earlier.set_result(Wait(0, 0.0))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
