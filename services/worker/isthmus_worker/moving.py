"""A running sequence is given away: paused between two steps, its KV staged, its end a HANDOFF (ADR 9).

Whatever goes wrong before the KV is sealed, the sequence goes on here, and the ingress learns that from the refusal or
from the next token.
"""

from __future__ import annotations

import asyncio

from isthmus_shared.engines.kv_port import KvSink
from isthmus_shared.errors import DeadlineExceeded, Fault, IsthmusError, StaleParty, Unavailable
from isthmus_shared.messages.work import KvTicket, SaveSequence, SubmitReply
from isthmus_worker.ports import RelayLink
from isthmus_worker.requests import Phase, Record
from isthmus_worker.sessions import Sessions

SAVE_S = 3.0
"""For the engine's step to end and for room in staging, while the client waits: below the 5 s of an ingress' call."""
_NOT_SAVED = Fault(code=Unavailable.code, what="the sequence goes on where it is")


async def save_sequence(sessions: Sessions, message: SaveSequence) -> SubmitReply:
    """Raises the typed refusal, and then the sequence goes on: `StaleParty`, `Unavailable`, `TransferFailed`,
    `StagingFull`, `DeadlineExceeded`, or what the engine refuses."""
    sessions.check_party(message.incarnation)
    record = sessions.requests.find(message.request_id, message.generation)
    if record is None:
        raise StaleParty(
            f"request {message.request_id} generation {message.generation} is not here",
            why="it ended, or its submit never came",
        )
    if record.phase is not Phase.STREAMING or record.is_prefill:
        raise Unavailable(f"request {message.request_id} does not decode", why=f"it is {record.phase.value}")
    link = sessions.attachment.require()
    saved = False
    try:
        async with asyncio.timeout(SAVE_S):
            ticket = await _save(sessions, record, link, message)
            saved = True
    except TimeoutError:
        raise DeadlineExceeded(f"the sequence could not be paused and staged within {SAVE_S:g} s") from None
    finally:
        if not saved:
            sessions.engine.resume(record.engine_id)
    return SubmitReply(ticket=ticket)


async def _save(sessions: Sessions, record: Record, link: RelayLink, message: SaveSequence) -> KvTicket:
    manifest = sessions.engine.manifest(await sessions.engine.pause(record.engine_id))
    sink = await link.open_sink(
        message.transfer_id,
        message.transfer_generation,
        manifest,
        deadline_s=message.deadline_s,
        wait_s=SAVE_S,
        retain_s=message.retain_s,
    )
    _begin(sessions, record, sink)
    record.sink = sink
    record.transfer_id, record.transfer_generation = message.transfer_id, message.transfer_generation
    record.retain_until_s = asyncio.get_running_loop().time() + max(message.deadline_s, message.retain_s)
    return KvTicket(
        transfer_id=message.transfer_id,
        generation=message.transfer_generation,
        source=link.relay,
        manifest=manifest,
    )


def _begin(sessions: Sessions, record: Record, sink: KvSink) -> None:
    try:
        sessions.wanted(record)
        sessions.engine.save(record.engine_id, sink)
    except IsthmusError:
        sink.abort(_NOT_SAVED)
        raise
