"""StepEvents as they nearly always are, read ten times as fast: an ingress gets one for each token.

`read_steps` takes what has this shape exactly and leaves everything else (logprobs, faults, another version, values
that would have to be converted, anything malformed) to `StepEvents.decode`. What it takes, that would read as the same.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from isthmus_shared.ids import Generation, Incarnation, NodeId, RequestId, WorkerId
from isthmus_shared.messages.base import PREVIOUS, VERSION
from isthmus_shared.messages.work import FinishReason, SequenceEvent, StepFacts

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class _Quick(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Holds nothing that could refer back to it, so the garbage collector need not look."""


class QuickRef(_Quick, frozen=True):
    worker_id: WorkerId
    incarnation: Incarnation
    node_id: NodeId


class QuickEvent(_Quick, frozen=True):
    """`SequenceEvent` without logprobs and fault."""

    request_id: RequestId
    generation: Generation
    output_index: _Count
    token_ids: tuple[_Count, ...] = ()
    finish: FinishReason | None = None
    cached_tokens: int = 0

    def as_event(self) -> SequenceEvent:
        return SequenceEvent(
            request_id=self.request_id,
            generation=self.generation,
            output_index=self.output_index,
            token_ids=self.token_ids,
            finish=self.finish,
            cached_tokens=self.cached_tokens,
        )


class QuickFacts(_Quick, frozen=True):
    """`StepFacts`."""

    number: _Count
    ended_s: _Seconds
    step_s: _Seconds
    decode_sequences: _Count
    prefill_tokens: _Count
    kv_loads: _Count = 0


class QuickSteps(_Quick, frozen=True):
    """`StepEvents`."""

    kind: Literal["step_events"]
    v: int
    worker: QuickRef
    events: Annotated[tuple[QuickEvent, ...], msgspec.Meta(min_length=1)]
    step: QuickFacts | None = None


Facts = StepFacts | QuickFacts
"""Either, for whoever reads their fields."""

_DECODER = msgspec.msgpack.Decoder(QuickSteps)


def read_steps(data: bytes) -> QuickSteps | None:
    """None: let `StepEvents.decode` say what it is, or what is wrong with it."""
    try:
        steps = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return steps if steps.v in (VERSION, PREVIOUS) else None
