"""What goes into a request's state machine (events) and what comes out (effects). All frozen; none does anything."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from isthmus_shared.errors import IsthmusError
from isthmus_shared.ids import Generation, Incarnation
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.route import Route
from isthmus_shared.messages.work import FinishReason, KvTicket, RelayRef, SequenceEvent, TokenLogprob, WorkerRef

CancelReason = Literal["client_gone", "finished", "replanned", "deadline"]


class SagaState(StrEnum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    CROSSING = "crossing"
    DECODING = "decoding"
    DONE = "done"
    FAILED = "failed"


class Call(StrEnum):
    """Which of the requests to a worker was answered."""

    PREFILL = "prefill"
    DECODE = "decode"
    START = "start"
    SAVE = "save"
    """Its generation is the new flow's."""


# Events


@dataclass(frozen=True, slots=True)
class Begin:
    """The request was admitted; comes once, first."""


@dataclass(frozen=True, slots=True)
class Routed:
    generation: Generation
    route: Route


@dataclass(frozen=True, slots=True)
class RouteFailed:
    generation: Generation
    error: IsthmusError


@dataclass(frozen=True, slots=True)
class Answered:
    """A worker's reply to a submit or a start, or why there is none (`error`)."""

    call: Call
    generation: Generation
    ticket: KvTicket | None = None
    error: IsthmusError | None = None


@dataclass(frozen=True, slots=True)
class Output:
    incarnation: Incarnation
    event: SequenceEvent


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker's life is over (`certain`: its relay saw it end) or it has fallen silent (it may come back)."""

    incarnation: Incarnation
    why: str
    certain: bool = True


@dataclass(frozen=True, slots=True)
class WorkerBack:
    """One that had only fallen silent is heard again."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class MoveWanted:
    """What decodes on that worker should go on elsewhere. What others need to know of it to fetch its KV."""

    incarnation: Incarnation
    relay: RelayRef
    model_fingerprint: str
    kv_form: str


@dataclass(frozen=True, slots=True)
class StopFound:
    """The text so far ends in a stop string: no more tokens are wanted."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client left, or does not read."""


@dataclass(frozen=True, slots=True)
class BusBack:
    """The bus is in reach again. What was said to us meanwhile is lost."""


@dataclass(frozen=True, slots=True)
class StepBroke:
    """A bug was met while an effect was carried out: this request ends, and no other."""

    error: IsthmusError


@dataclass(frozen=True, slots=True)
class Tick:
    """The time `wake_at_s` has come."""


Event = (
    Begin
    | Routed
    | RouteFailed
    | Answered
    | Output
    | WorkerGone
    | WorkerBack
    | MoveWanted
    | StopFound
    | ClientGone
    | BusBack
    | StepBroke
    | Tick
)


# Effects


@dataclass(frozen=True, slots=True)
class AskRoute:
    generation: Generation
    exclude: tuple[Incarnation, ...]
    staged: KvTicket | None = None
    """The request's KV is there already."""
    moving: MoveWanted | None = None
    """It is about to be staged by that worker."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Send SubmitPrefill or SubmitDecode (`role`) with the prompt followed by `output`."""

    role: Role
    worker: WorkerRef
    generation: Generation
    output: tuple[int, ...]
    ticket: KvTicket | None
    deadline_s: float
    """Of the worker's part."""
    retain_s: float = 0.0
    """Prefill: until the request's own time is over."""


@dataclass(frozen=True, slots=True)
class Start:
    worker: WorkerRef
    generation: Generation
    first_token_id: int


@dataclass(frozen=True, slots=True)
class Save:
    """Send SaveSequence: the sequence of attempt `generation` is to be staged as `transfer_generation`."""

    worker: WorkerRef
    generation: Generation
    transfer_generation: Generation
    deadline_s: float
    retain_s: float


@dataclass(frozen=True, slots=True)
class SendRelease:
    """What was fetched from that attempt's staging is not wanted again."""

    worker: WorkerRef
    generation: Generation


@dataclass(frozen=True, slots=True)
class Noted:
    """For metrics and log: KV is fetched again instead of prefilled again; a sequence has left its worker, or stays."""

    what: Literal["resumed", "moved", "stayed"]


@dataclass(frozen=True, slots=True)
class SendCancel:
    worker: WorkerRef
    generation: Generation
    reason: CancelReason


@dataclass(frozen=True, slots=True)
class Deliver:
    """New tokens for the client, in order, each exactly once over all attempts."""

    output_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Replanned:
    """For metrics and log: attempt `generation` begins because of `error`."""

    generation: Generation
    error: IsthmusError


@dataclass(frozen=True, slots=True)
class End:
    """The last effect of every saga: with a reason (STOP, LENGTH) or an error, never both."""

    finish: FinishReason | None
    error: IsthmusError | None


Effect = AskRoute | Submit | Start | Save | SendCancel | SendRelease | Deliver | Replanned | Noted | End
