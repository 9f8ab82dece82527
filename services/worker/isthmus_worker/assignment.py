"""What the leading planner tells this worker to be. Taken at once and fenced by epoch; done by `run`, one thing after
the other, and seen in the heartbeat."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from isthmus_shared.errors import Draining, InvalidRequest, StaleParty
from isthmus_shared.messages.assign import AssignRoles
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.work import Ack
from isthmus_worker.sessions import Sessions


@dataclass(frozen=True, slots=True)
class Wanted:
    """Both as the latest assignment has them; it replaces an earlier one that is not done yet."""

    roles: tuple[Role, ...]
    model: str
    move: bool


class Assignments:
    """`carry_out` makes the worker what is wanted; it is never called twice at once."""

    def __init__(
        self,
        sessions: Sessions,
        *,
        roles: Callable[[], tuple[Role, ...]],
        model: Callable[[], str],
        models: tuple[str, ...],
        carry_out: Callable[[Wanted], Awaitable[None]],
    ) -> None:
        self._sessions, self._roles, self._model, self.models = sessions, roles, model, models
        self._carry_out = carry_out
        self._wanted: Wanted | None = None
        self._news = asyncio.Event()
        self._seen_epoch = 0
        self.epoch = 0
        """Of the latest assignment that was taken; 0: none."""

    async def assign(self, message: AssignRoles) -> Ack:
        """Raises `StaleParty` (another life is meant, or a newer leader is known), `InvalidRequest` (nothing that this
        worker could be) or `Draining`."""
        self._sessions.check_party(message.incarnation)
        worker = self._sessions.worker.worker_id
        if message.epoch < self._seen_epoch:
            raise StaleParty(
                f"an assignment of epoch {message.epoch} is stale",
                why=f"worker {worker} has heard of epoch {self._seen_epoch}",
                todo="another planner leads: stop assigning",
            )
        self._seen_epoch = message.epoch
        if self._sessions.draining:
            raise Draining(f"worker {worker} is draining", retry_after_s=1.0)
        unable = [role.value for role in message.roles if role not in self._roles()]
        if unable:
            raise InvalidRequest(
                f"worker {worker} cannot take the role {unable[0]!r}",
                todo="list it in ISTHMUS_WORKER_ROLES_ABLE",
                param="roles",
            )
        model = message.model or self._model()
        if model not in self.models:
            raise InvalidRequest(
                f"worker {worker} cannot load the model {model[:128]!r}",
                why=f"it has {', '.join(self.models)}",
                todo="list it in ISTHMUS_WORKER_MODELS",
                param="model",
            )
        self.epoch = message.epoch
        self._wanted = Wanted(tuple(dict.fromkeys(message.roles)), model, message.move)
        self._news.set()
        return Ack()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            assert self._wanted is not None, "news without an assignment"
            await self._carry_out(self._wanted)
