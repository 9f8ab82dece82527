"""The prefill role: SubmitPrefill in, KV into the node's relay, the first token and a ticket out."""

from __future__ import annotations

import asyncio

from isthmus_shared.errors import Cancelled, Fault
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.subjects import worker_prefill
from isthmus_shared.messages.work import KvTicket, SubmitPrefill, SubmitReply
from isthmus_worker.requests import Phase, Record
from isthmus_worker.roles import Served, Serving, refuse_submit
from isthmus_worker.sessions import Sessions

NOT_SUBMITTED = Fault(code=Cancelled.code, what="the prefill was not accepted by the engine")


class PrefillRole:
    role = Role.PREFILL

    def __init__(self, staging_wait_s: float) -> None:
        self._staging_wait_s = staging_wait_s

    def served(self, sessions: Sessions) -> tuple[Served, ...]:
        async def handle(message: SubmitPrefill) -> SubmitReply:
            return await self.submit(sessions, message)

        return (Serving(worker_prefill(sessions.worker.worker_id), SubmitPrefill, handle, refuse_submit),)

    async def submit(self, sessions: Sessions, message: SubmitPrefill) -> SubmitReply:
        """Room in staging first, then the engine: a prefill that has begun can always write.

        Raises the typed refusal, and then nothing is held: `StaleParty`, `Cancelled`, `Draining`, `TransferFailed`,
        `StagingFull`, or what the engine refuses.
        """
        now_s = asyncio.get_running_loop().time()
        record = Record(
            request_id=message.request_id,
            generation=message.generation,
            events_subject=message.events_subject,
            deadline_at_s=now_s + message.deadline_s,
            next_index=message.output_offset,
            transfer_id=message.transfer_id,
            transfer_generation=message.generation,
            retain_until_s=now_s + message.retain_s,
            is_prefill=True,
        )
        await sessions.admit(record, message.incarnation)
        try:
            link = sessions.attachment.require()
            manifest = sessions.engine.manifest(len(message.token_ids))
            record.sink = await link.open_sink(
                message.transfer_id,
                message.generation,
                manifest,
                deadline_s=message.deadline_s,
                wait_s=min(self._staging_wait_s, message.deadline_s),
                retain_s=message.retain_s,
            )
            sessions.wanted(record)
            sessions.to_engine(record, message)
        finally:
            if record.phase is Phase.OPENING:
                sessions.not_in_engine(record, NOT_SUBMITTED)
        return SubmitReply(
            ticket=KvTicket(
                transfer_id=message.transfer_id, generation=message.generation, source=link.relay, manifest=manifest
            )
        )
