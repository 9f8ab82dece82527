"""What a saga remembers of one attempt: the route, and the parties that hold something for it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from isthmus_ingress.saga_types import CancelReason, SagaState
from isthmus_shared.errors import DeadlineExceeded, IsthmusError, PartyLost
from isthmus_shared.ids import Generation, Incarnation
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.quick import QuickEvent
from isthmus_shared.messages.route import Route
from isthmus_shared.messages.work import FinishReason, KvTicket, SequenceEvent, WorkerRef

MIN_DEADLINE_S = 0.001
"""Workers are never given less: their messages want a positive time, and our own deadline ends the request anyway."""


class Ended(Enum):
    """Why a party holds nothing for us any more."""

    TERMINAL = "its own terminal event"
    REFUSED = "it refused, or nobody listened"
    GONE = "it died"
    CONSUMED = "decode has the KV"
    CANCELLED = "we cancelled it"
    RELEASED = "decode has the KV, and what is retained of it was released"


@dataclass(slots=True)
class Party:
    role: Role
    worker: WorkerRef
    generation: Generation
    heard: bool = False
    """It has sent tokens."""
    handed_off: bool = False
    """Its KV is sealed; only staged bytes are left to free."""
    ended: Ended | None = None
    reason: CancelReason = "finished"

    def why_ended(self, seq: SequenceEvent) -> IsthmusError:
        """What its own terminal event says, when that is neither STOP nor LENGTH."""
        if seq.finish is FinishReason.CANCELLED or seq.fault is None:
            return PartyLost(f"worker {self.worker.worker_id} ended the request unasked")
        return seq.fault.to_error()


RESYNC_S = 2.0
"""From the bus' return until an attempt must be heard. Workers keep what they could not send and reconnect as fast as
we do, so one that still has something to say says it within a step or two."""


@dataclass(slots=True)
class Attempt:
    route: Route
    submitted_at_s: float
    offset: int
    """Output tokens that were already delivered when it began."""
    parties: dict[Role, Party]
    ticket: KvTicket | None = None
    first_token_at_s: float | None = None
    last_token_at_s: float = 0.0
    decode_accepted: bool = False
    start_sent: bool = False
    """Or none is needed: the last token is known."""
    resumed: bool = False
    """Its KV was staged before it began."""
    lost: tuple[IsthmusError, Incarnation | None] | None = None
    """Why there is no decode side, while prefill goes on; and whose life to leave out next time."""
    resync_by_s: float | None = None
    """Set when the bus came back, until something is heard: what we wait for may have been said meanwhile."""

    def worker_deadline_s(self, left_s: float) -> float:
        """What a worker is given for its part, of the time that the request has left."""
        limits = self.route.deadlines
        return min(max(limits.ttft_s, limits.transfer_s), max(left_s, MIN_DEADLINE_S))

    def due_s(self) -> float:
        """When the next token must be here, by the route's deadlines."""
        due_s = self._due_s()
        return due_s if self.resync_by_s is None else min(due_s, self.resync_by_s)

    def _due_s(self) -> float:
        limits = self.route.deadlines
        if self.first_token_at_s is None:
            if self.resumed:
                return self.submitted_at_s + max(limits.ttft_s, limits.transfer_s) + limits.stall_s
            return self.submitted_at_s + limits.ttft_s
        if self.decode_heard:
            return self.last_token_at_s + limits.stall_s
        return max(self.submitted_at_s + limits.transfer_s, self.last_token_at_s) + limits.stall_s

    def overdue(self, now_s: float) -> tuple[IsthmusError, Incarnation | None]:
        """What to say when it isn't, and whose life to leave out next time (None: nobody is to blame)."""
        if self.resync_by_s is not None and now_s >= self.resync_by_s:
            return DeadlineExceeded(f"nothing was heard for {RESYNC_S:g} s after the bus came back"), None
        limits, decode = self.route.deadlines, self.route.decode.incarnation
        if self.first_token_at_s is None and not self.resumed:
            asked = self.parties.get(Role.PREFILL)
            error = DeadlineExceeded(f"no first token within ttft_s = {limits.ttft_s:g} s")
            return error, decode if asked is None else asked.worker.incarnation
        if self.decode_heard:
            return DeadlineExceeded(f"no token for stall_s = {limits.stall_s:g} s"), decode
        return DeadlineExceeded(f"KV not on the decode side within transfer_s = {limits.transfer_s:g} s"), decode

    def flows_from(self, party: Party) -> bool:
        """Whether that party's next tokens change nothing but the output: everyone else has had their say."""
        if party.role is not Role.DECODE or party.ended is not None or not party.heard:
            return False
        prefill = self.parties.get(Role.PREFILL)
        return prefill is None or (prefill.ended is not None and self.start_sent)

    @property
    def prefilling(self) -> bool:
        """Somebody prefills, and is not done."""
        prefill = self.parties.get(Role.PREFILL)
        return prefill is not None and prefill.ended is None and not prefill.handed_off

    def party(self, life: Incarnation, generation: Generation) -> Party | None:
        """Whose words are taken: one of this attempt, of that life, in its own generation."""
        for party in self.parties.values():
            if party.worker.incarnation == life and party.generation == generation:
                return party
        return None

    @property
    def decode_heard(self) -> bool:
        decode = self.parties.get(Role.DECODE)
        return decode is not None and decode.heard


@dataclass(slots=True)
class Flow:
    """A sequence of which nothing is awaited but its next tokens, and what they change: the output, and the time."""

    attempt: Attempt
    party: Party
    output: array[int]
    """The saga's own."""
    max_tokens: int

    def take(self, life: Incarnation, seq: SequenceEvent | QuickEvent, now_s: float) -> bool:
        """Tokens that come in turn and end nothing. False: this event is not of that kind, and the saga handles it."""
        party, index, tokens = self.party, seq.output_index, seq.token_ids
        if (
            index != len(self.output)
            or not 0 < len(tokens) < self.max_tokens - index
            or seq.generation != party.generation
            or party.worker.incarnation != life
            or party.ended is not None
        ):
            return False
        self.output.extend(tokens)
        self.attempt.last_token_at_s = now_s
        self.attempt.resync_by_s = None
        return True


def check_saga(state: SagaState, attempt: Attempt | None, kept: Party | None, parties: Iterable[Party]) -> None:
    """What holds between a saga's state, its attempt, the party whose KV it keeps, and every party ever asked."""
    current = [] if attempt is None else list(attempt.parties.values())
    if kept is not None:
        current.append(kept)
    live = [party for party in parties if party.ended is None]
    assert all(any(party is ours for ours in current) for party in live), "a party of an older attempt has no end"
    if state in (SagaState.DONE, SagaState.FAILED):
        assert attempt is None
        assert kept is None
        assert not live
    elif state is SagaState.QUEUED:
        assert attempt is None
    else:
        assert attempt is not None
        assert (attempt.first_token_at_s is not None) == (state is SagaState.DECODING)
