"""The decode role: with a ticket, fetch the KV and go on from the first token, or from those that are known already;
without one, do everything here. A sequence that runs may be asked back, with its KV."""

from __future__ import annotations

import asyncio

from isthmus_shared.errors import Cancelled, Fault, ManifestMismatch, StaleParty
from isthmus_shared.kv.negotiate import require_exchangeable
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.subjects import worker_decode, worker_save, worker_start
from isthmus_shared.messages.work import KvTicket, SaveSequence, StartDecode, SubmitDecode, SubmitReply
from isthmus_worker.moving import save_sequence
from isthmus_worker.requests import Phase, Record
from isthmus_worker.roles import Served, Serving, refuse_ack, refuse_submit
from isthmus_worker.sessions import Sessions

NOT_SUBMITTED = Fault(code=Cancelled.code, what="the decode was not accepted by the engine")


class DecodeRole:
    role = Role.DECODE

    def served(self, sessions: Sessions) -> tuple[Served, ...]:
        async def submit(message: SubmitDecode) -> SubmitReply:
            return await self.submit(sessions, message)

        async def save(message: SaveSequence) -> SubmitReply:
            return await save_sequence(sessions, message)

        worker = sessions.worker.worker_id
        return (
            Serving(worker_decode(worker), SubmitDecode, submit, refuse_submit),
            Serving(worker_start(worker), StartDecode, sessions.start_decode, refuse_ack),
            Serving(worker_save(worker), SaveSequence, save, refuse_submit),
        )

    async def submit(self, sessions: Sessions, message: SubmitDecode) -> SubmitReply:
        """Raises the typed refusal, and then nothing is held: `StaleParty`, `Cancelled`, `Draining`,
        `ManifestMismatch`, `TransferFailed`, `PartyLost`, or what the engine refuses."""
        ticket = message.ticket
        waits = ticket is not None and ticket.manifest.prompt_tokens == len(message.token_ids)
        record = Record(
            request_id=message.request_id,
            generation=message.generation,
            events_subject=message.events_subject,
            deadline_at_s=None if ticket is None else asyncio.get_running_loop().time() + message.transfer_deadline_s,
            next_index=message.output_offset + waits,
            transfer_id=None if ticket is None else ticket.transfer_id,
            transfer_generation=message.generation if ticket is None else ticket.generation,
        )
        await sessions.admit(record, message.incarnation)
        try:
            if ticket is not None:
                await self._open(sessions, record, ticket, message)
                sessions.wanted(record)
            sessions.to_engine(record, message)
        finally:
            if record.phase is Phase.OPENING:
                sessions.not_in_engine(record, NOT_SUBMITTED)
        return SubmitReply()

    async def _open(self, sessions: Sessions, record: Record, ticket: KvTicket, message: SubmitDecode) -> None:
        """An older attempt's ticket is as good: its relay gives the KV to the highest `pull` only."""
        if ticket.generation > message.generation:
            raise StaleParty(
                f"the ticket is of generation {ticket.generation}",
                why=f"the submit is of generation {message.generation}",
                todo="plan the request anew",
            )
        tokens = ticket.manifest.prompt_tokens
        if tokens > len(message.token_ids):
            raise ManifestMismatch(
                "the ticket is for another prompt",
                why=f"it has {tokens} tokens, the submit {len(message.token_ids)}",
                param="prompt_tokens",
            )
        require_exchangeable(sessions.engine.manifest(tokens), ticket.manifest)
        await sessions.claim_flow(record)
        link = sessions.attachment.require()
        record.source = await link.open_source(ticket, deadline_s=message.transfer_deadline_s)
