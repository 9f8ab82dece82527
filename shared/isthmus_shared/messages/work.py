"""Work: what an ingress asks of workers, and what they answer.

A request's parties speak in this order (disaggregated):

    ingress → prefill   SubmitPrefill        ← SubmitReply (ticket: where the KV will be)
    ingress → decode    SubmitDecode(ticket) ← SubmitReply
    prefill → ingress   StepEvents: first token, finish HANDOFF
    ingress → decode    StartDecode(first token)
    decode  → ingress   StepEvents: tokens … finish
    ingress → any       Cancel, at any time

One whose KV is staged already (its decode worker died, or gives it away; ADR 9):

    ingress → decode    SaveSequence         ← SubmitReply (ticket), StepEvents: finish HANDOFF     (gives it away)
    ingress → decode    SubmitDecode(ticket, more tokens than it is for) ← SubmitReply
    decode  → ingress   StepEvents: tokens … finish
    ingress → any       Release, when all is over

Every message names the attempt (`generation`) and the life of the process it is meant for (`incarnation`).
Durations travel, never instants: clocks differ between nodes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from isthmus_shared.errors import Fault
from isthmus_shared.ids import Generation, Incarnation, NodeId, RequestId, TransferId, WorkerId
from isthmus_shared.kv.manifest import KvManifest
from isthmus_shared.messages.base import WireMessage

MAX_TOP_LOGPROBS = 20  # OpenAI's limit
MAX_STOP_TOKEN_IDS = 64

MAX_COUNT = 2**31
"""Above any vocabulary and any sequence, and a number that every wire format carries."""

TokenId = Annotated[int, Field(ge=0)]


class Part(BaseModel):
    """Base of what messages are made of."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FinishReason(StrEnum):
    STOP = "stop"
    """End-of-sequence token or a stop token id. (Stop *strings* are the ingress' work: text does not travel.)"""
    LENGTH = "length"
    HANDOFF = "handoff"
    """Prefill's part is over; the sequence goes on elsewhere."""
    CANCELLED = "cancelled"
    ERROR = "error"


class SamplingParams(Part):
    """How to choose tokens. A pure function of these, the output index, the output so far and the logits."""

    max_tokens: int = Field(gt=0, lt=MAX_COUNT)
    """Tokens of output in all, those of earlier attempts (`output_offset`) included."""
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, lt=MAX_COUNT)
    """0 keeps all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int = Field(default=0, ge=0, lt=2**64)
    """Always given by the ingress (drawn there if the client gave none)."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """None: no logprobs. k: the chosen token's logprob and the k most likely ones (of the unmodified distribution)."""


class TokenLogprob(Part):
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""


class RelayRef(Part):
    """Where a node's relay is reached by other relays."""

    node_id: NodeId
    incarnation: Incarnation
    address: str
    """host:port of its TCP lane listener."""


class KvTicket(Part):
    """What the decode side needs to fetch one transfer's KV."""

    transfer_id: TransferId
    generation: Generation = Field(gt=0)
    source: RelayRef
    manifest: KvManifest
    pull: int = Field(default=1, gt=0, lt=2**32)
    """Which attempt to fetch it: with a higher one another destination takes the staged KV over, without a second
    prefill; late frames of a lower one are refused."""


class WorkerRef(Part):
    worker_id: WorkerId
    incarnation: Incarnation
    node_id: NodeId


class _Work(WireMessage):
    request_id: RequestId
    generation: Generation = Field(gt=0)
    incarnation: Incarnation
    """The life of the worker this is meant for; another life answers `stale_party`."""


MAX_SALT_CHARS = 256
CacheSalt = Annotated[str, Field(max_length=MAX_SALT_CHARS)]
"""Prefixes are shared between requests of one salt only. A tenant's secret; empty: shared with all that have none."""


class SubmitPrefill(_Work):
    KIND: ClassVar[str] = "submit_prefill"

    transfer_id: TransferId
    events_subject: str
    token_ids: tuple[TokenId, ...] = Field(min_length=1)
    output_offset: int = Field(default=0, ge=0)
    sampling: SamplingParams
    deadline_s: float = Field(gt=0)
    """From receipt to the end of the transfer; then everything held for it is freed."""
    retain_s: float = Field(default=0.0, ge=0)
    """From receipt: how long the relay may keep the KV once it was fetched, for another destination, if that costs
    nobody anything. Not more than `deadline_s`: until then."""
    cache_salt: CacheSalt = ""


class SubmitDecode(_Work):
    KIND: ClassVar[str] = "submit_decode"

    events_subject: str
    token_ids: tuple[TokenId, ...] = Field(min_length=1)
    output_offset: int = Field(default=0, ge=0)
    sampling: SamplingParams
    ticket: KvTicket | None = None
    """None: aggregated; the worker prefills the prompt itself and no StartDecode follows. One for fewer tokens than
    `token_ids` has: the rest is computed here, and no StartDecode follows either."""
    transfer_deadline_s: float = Field(gt=0)
    """From receipt to committed KV and first token (ticket given), else unused."""
    cache_salt: CacheSalt = ""


class SaveSequence(_Work):
    """Give a running sequence away: pause it between two steps, stage its KV, end it with HANDOFF.

    `generation` is that of the attempt that runs. Refused, or if there is no room in staging in time, it goes on.
    """

    KIND: ClassVar[str] = "save_sequence"

    transfer_id: TransferId
    transfer_generation: Generation = Field(gt=0)
    """Of the new flow; above every earlier one of that transfer."""
    deadline_s: float = Field(gt=0)
    """From receipt to the end of the transfer."""
    retain_s: float = Field(default=0.0, ge=0)
    """As in SubmitPrefill."""


class SubmitReply(WireMessage):
    """Accepted (no fault), with the ticket when KV is staged by it; or refused, and nothing is held."""

    KIND: ClassVar[str] = "submit_reply"

    ticket: KvTicket | None = None
    fault: Fault | None = None


class StartDecode(_Work):
    KIND: ClassVar[str] = "start_decode"

    first_token_id: TokenId


class Cancel(_Work):
    """End whatever this worker holds for the request (sequence, sink, source, staged KV). Always acknowledged."""

    KIND: ClassVar[str] = "cancel"

    reason: Literal["client_gone", "finished", "replanned", "deadline"] = "client_gone"


MAX_RELEASED = 256
"""In one message."""


class Released(Part):
    request_id: RequestId
    generation: Generation = Field(gt=0)


class Release(WireMessage):
    """Those requests are over: what is retained for them may go. Published; a lost one leaves it to the budget."""

    KIND: ClassVar[str] = "release"

    incarnation: Incarnation
    released: tuple[Released, ...] = Field(min_length=1, max_length=MAX_RELEASED)


class MoveRequests(WireMessage):
    """To every ingress: move what runs on that life of a worker elsewhere, where that can be done. Published."""

    KIND: ClassVar[str] = "move_requests"

    worker: WorkerRef
    why: str = Field(max_length=256)


class Ack(WireMessage):
    KIND: ClassVar[str] = "ack"

    fault: Fault | None = None


class SequenceEvent(Part):
    """One step's effect on one sequence, as in `engines.port.SequenceOutput`."""

    request_id: RequestId
    generation: Generation
    output_index: int = Field(ge=0)
    token_ids: tuple[TokenId, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: FinishReason | None = None
    fault: Fault | None = None
    cached_tokens: int = 0
    """With the first token."""


class StepFacts(Part):
    """The engine step behind some events, so that an ingress can say why a token was late."""

    number: int = Field(ge=0)
    """Of the steps that gave output in this life of the worker: where two of a stream's tokens are more than one
    apart, it was left out in between."""
    ended_s: float = Field(ge=0)
    """Since the worker's start, by its own clock: only differences mean anything to others."""
    step_s: float = Field(ge=0)
    decode_sequences: int = Field(ge=0)
    prefill_tokens: int = Field(ge=0)
    kv_loads: int = Field(default=0, ge=0)
    """Sequences whose KV was copied into the cache in this step."""


class StepEvents(WireMessage):
    """One message per step and ingress. `output_index` lets the ingress see a gap or a duplicate in any stream."""

    KIND: ClassVar[str] = "step_events"

    worker: WorkerRef
    events: tuple[SequenceEvent, ...] = Field(min_length=1)
    step: StepFacts | None = None
    """None for what no step gave: a failure, a cancellation."""
