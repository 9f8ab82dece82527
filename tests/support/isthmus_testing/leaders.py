"""Planners' lease keepers on a real bus, and somebody who looks at all of them all the time."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from dataclasses import dataclass, field

from isthmus_planner.leader.keeper import LeaseKeeper
from isthmus_shared.bus.nats import NatsBus
from isthmus_testing.waiting import tick


@dataclass
class Planner:
    keeper: LeaseKeeper
    task: asyncio.Task[None]
    bus: NatsBus

    @property
    def epoch(self) -> int | None:
        return None if self.task.done() else self.keeper.epoch

    async def stop(self, *, kill: bool = False) -> None:
        if kill:  # nothing of it reaches the bucket any more
            await self.bus.close()
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


@dataclass
class Watch:
    """Looks at every planner at each turn of the event loop that it gets."""

    planners: list[Planner] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    together: list[tuple[int, ...]] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            leading = tuple(planner.epoch for planner in self.planners if planner.epoch is not None)
            if len(leading) > 1:
                self.together.append(leading)
            if leading and (not self.epochs or self.epochs[-1] != leading[0]):
                self.epochs.append(leading[0])
            await tick()

    @property
    def leader(self) -> Planner | None:
        return next((planner for planner in self.planners if planner.epoch is not None), None)

    def check(self) -> None:
        assert not self.together, "two planners led at once"
        assert all(earlier < later for earlier, later in itertools.pairwise(self.epochs))
