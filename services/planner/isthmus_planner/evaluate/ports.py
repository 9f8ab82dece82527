"""What a simulated cluster asks of a policy, and tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from isthmus_shared.messages.health import RelayHeartbeat, WorkerHeartbeat
from isthmus_shared.messages.outcomes import Outcome
from isthmus_shared.messages.route import Prediction, Slo


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that wants a route. What is not known when it comes (its output's length) is not in it."""

    number: int
    isl_tokens: int
    max_osl_tokens: int
    slo: Slo | None
    tenant: str = ""
    came_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Placed:
    """Workers by their index."""

    prefill: int | None
    """None: aggregated."""
    decode: int
    predicted: Prediction | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    retry_after_s: float = 1.0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """In line: the policy names it in a later `poll`."""


Verdict = Placed | Refused | Held


class Policy(Protocol):
    name: str

    def ask(self, ask: Ask, now_s: float) -> Verdict: ...

    def poll(self, now_s: float) -> list[tuple[Ask, Verdict]]:
        """Of those held: who goes or is refused now."""
        ...

    def beat(self, index: int, beat: WorkerHeartbeat, now_s: float) -> None:
        """A worker's heartbeat, as it goes over the bus."""
        ...

    def relay_beat(self, beat: RelayHeartbeat, now_s: float) -> None: ...

    def ended(self, index: int | None, decode: int, outcome: Outcome) -> None:
        """A request that it placed (prefill, decode) has ended."""
        ...

    def prefilled(self, index: int, isl_tokens: int) -> None:
        """A prompt that it placed on that worker is computed: its first token passed by."""
        ...
