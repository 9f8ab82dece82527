"""What `BatchingEngine` asks of whatever computes its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from isthmus_shared.engines.sequence import Batch
from isthmus_shared.errors import EngineFailed, Fault, IsthmusError
from isthmus_shared.kv.layout import KvLayout
from isthmus_shared.kv.shape import KvShape
from isthmus_shared.messages.work import TokenLogprob

RUNNER_FAULTS = (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError, OSError, MemoryError, IsthmusError)
"""What a step may raise: torch's errors are RuntimeErrors. An AssertionError is our bug and ends the engine."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    shape: KvShape
    layout: KvLayout
    blocks_total: int
    max_model_len_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class WorkResult:
    """One work's outcome: a token if it samples, or a fault of this sequence alone (its sink or source failed)."""

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    results: Sequence[WorkResult]
    """One per work, in the batch's order."""
    took_s: float
    """By the runner's own clock, since a production loop's clock counts whole milliseconds."""


class Runner(Protocol):
    async def start(self) -> RunnerInfo:
        """Load and warm up."""
        ...

    async def execute(self, batch: Batch) -> StepResult:
        """Compute one step. Loads and saves KV of the works that ask for it.

        An exception fails every running sequence.
        """
        ...

    async def stop(self) -> None: ...


def step_fault(error: BaseException) -> Fault:
    """What the sequences of a step are told that has raised that."""
    if isinstance(error, IsthmusError):
        return error.to_fault()
    return EngineFailed("a step failed", why=f"{type(error).__name__}: {error}").to_fault()
