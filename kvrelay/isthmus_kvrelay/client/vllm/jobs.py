"""What the scheduler's connector tells the workers' with each step. Plain values: they may cross processes."""

from __future__ import annotations

from dataclasses import dataclass, field

Blocks = tuple[tuple[int, ...], ...]
"""A request's block table for each of vLLM's cache groups."""

NULL_BLOCK = 0
"""vLLM's placeholder for a block outside a sliding window."""


@dataclass(frozen=True, slots=True)
class FlowName:
    """Names a transfer, and says whose ranks it goes between."""

    transfer_id: str
    generation: int
    prompt_tokens: int
    producer_tp: int
    consumer_tp: int


@dataclass(frozen=True, slots=True)
class Origin:
    """The relay that has the transfer (`messages.work.RelayRef`), and the attempt to fetch it."""

    node_id: str
    incarnation: str
    address: str
    pull: int


@dataclass(frozen=True, slots=True)
class SaveJob:
    """After this step tokens `0 … computed − 1` of the prompt are in those blocks."""

    request_id: str
    flow: FlowName
    blocks: Blocks
    computed: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Write tokens `start … end − 1` of the flow to those blocks. With `refusal` it fails at once, saying that."""

    request_id: str
    flow: FlowName
    origin: Origin
    blocks: Blocks
    start: int
    end: int
    deadline_s: float
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Discard:
    """A transfer that nobody here wants any more."""

    flow: FlowName
    origin: Origin


@dataclass(frozen=True, slots=True)
class StepJobs:
    fingerprint: str = ""
    saves: tuple[SaveJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    preempted: frozenset[str] = field(default_factory=frozenset)
    """Requests with a `SaveJob` that have lost their blocks: to be let go of before this step's forward."""
    dropped: frozenset[str] = field(default_factory=frozenset)
    """Requests with a `SaveJob` whose transfer is to be aborted."""
    cancelled: frozenset[str] = field(default_factory=frozenset)
    """Requests with a `LoadJob` that nobody waits for."""
    discarded: tuple[Discard, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.saves or self.loads or self.preempted or self.dropped or self.cancelled or self.discarded)
