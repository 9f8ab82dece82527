"""What goes into a request's state machine (events) and what comes out (effects). All frozen; none does anything."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from isthmus_shared.errors import IsthmusError
from isthmus_shared.ids import Generation, Incarnation
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.route import Route
from isthmus_shared.messages.work import FinishReason, KvTicket, SequenceEvent, TokenLogprob, WorkerRef

CancelReason = Literal["client_gone", "finished", "replanned", "deadline"]


class SagaState(StrEnum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    CROSSING = "crossing"
    DECODING = "decoding"
    DONE = "done"
    FAILED = "failed"


class Call(StrEnum):
    """Which of the three requests to a worker was answered."""

    PREFILL = "prefill"
    DECODE = "decode"
    START = "start"


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
    Begin | Routed | RouteFailed | Answered | Output | WorkerGone | StopFound | ClientGone | BusBack | StepBroke | Tick
)


# Effects


@dataclass(frozen=True, slots=True)
class AskRoute:
    generation: Generation
    exclude: tuple[Incarnation, ...]


@dataclass(frozen=True, slots=True)
class Submit:
    """Send SubmitPrefill or SubmitDecode (`role`) with the prompt followed by `output`."""

    role: Role
    worker: WorkerRef
    generation: Generation
    output: tuple[int, ...]
    ticket: KvTicket | None
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Start:
    worker: WorkerRef
    generation: Generation
    first_token_id: int


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


Effect = AskRoute | Submit | Start | SendCancel | Deliver | Replanned | End
