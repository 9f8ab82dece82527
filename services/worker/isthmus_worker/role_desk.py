"""The roles of a running worker: what it answers for, what it is about to stop answering for, what it could.

A role that ends does so in three parts. It is taken out of the heartbeat at once, so that no new work is routed to it.
For a while (`linger_s`) it goes on taking what was routed before everyone knew (a route's decode side is
asked once its prefill has found staging room), then it refuses (`Draining`: plan anew). It is
detached when the last request that it took in has ended; until then that request's own subjects are answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from isthmus_shared.messages.health import Role
from isthmus_shared.runtime import ServiceRuntime
from isthmus_worker.config import WorkerConfig
from isthmus_worker.roles import RoleHandlers
from isthmus_worker.sessions import Sessions


class RoleDesk:
    """`own` are attached at the start, `able` may be later. Tasks live in `tasks`, which the owner ends."""

    def __init__(
        self,
        runtime: ServiceRuntime[WorkerConfig],
        sessions: Sessions,
        own: Sequence[RoleHandlers],
        able: Sequence[RoleHandlers],
    ) -> None:
        self._runtime, self._sessions = runtime, sessions
        self._own = tuple(each.role for each in own)
        self._handlers = {each.role: each for each in (*able, *own)}
        self._attached: dict[Role, list[asyncio.Task[None]]] = {}
        self._leaving: dict[Role, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Before anything else: where the answering tasks run."""
        self._tasks = tasks

    @property
    def able(self) -> tuple[Role, ...]:
        """Every role that could be attached here."""
        return tuple(sorted(self._handlers))

    @property
    def shown(self) -> tuple[Role, ...]:
        """Roles that new work may be sent to."""
        return tuple(sorted(role for role in self._attached if role not in self._leaving))

    @property
    def settled(self) -> bool:
        """Whether no role is on its way out."""
        return not self._leaving

    async def attach_own(self) -> None:
        for role in self._own:
            await self.attach(self._handlers[role])

    async def become(self, roles: Sequence[Role]) -> tuple[Role, ...]:
        """Exactly those from now on; returns the ones that have begun to end."""
        for role in roles:
            if role in self._leaving:
                self._leaving.pop(role).cancel()
                self._sessions.closed.discard(role)
                self._runtime.log.info("role.kept", role=role.value)
            elif role not in self._attached:
                await self.attach(self._handlers[role])
        ending = tuple(role for role in self.shown if role not in roles)
        for role in ending:
            self._leaving[role] = self._tasks.create_task(self._leave(role), name=f"leave-{role.value}")
            self._runtime.log.info("role.ending", role=role.value)
        return ending

    async def attach(self, role: RoleHandlers) -> None:
        """Starts answering for that role; returns when requests can arrive."""
        served = role.served(self._sessions)
        listening = [asyncio.Event() for _ in served]
        self._sessions.closed.discard(role.role)
        self._handlers[role.role] = role
        self._attached[role.role] = [
            self._tasks.create_task(
                self._runtime.serve(
                    each.subject, each.request_type, each.handler, on_error=each.on_error, listening=event
                )
            )
            for each, event in zip(served, listening, strict=True)
        ]
        for event in listening:
            await event.wait()
        self._runtime.log.info("role.attached", role=role.role.value)

    def detach(self, role: Role) -> None:
        """Stops answering for that role. What it has taken in goes on to its end."""
        leaving = self._leaving.pop(role, None)
        if leaving is not None and leaving is not asyncio.current_task():
            leaving.cancel()
        for task in self._attached.pop(role, []):
            task.cancel()
        self._runtime.log.info("role.detached", role=role.value)

    def detach_all(self) -> None:
        for role in list(self._attached):
            self.detach(role)

    async def _leave(self, role: Role) -> None:
        await asyncio.sleep(self._runtime.config.linger_s)
        self._sessions.closed.add(role)
        await self._sessions.no_more_of(role)
        self.detach(role)
