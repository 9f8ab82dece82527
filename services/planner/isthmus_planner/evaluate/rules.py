"""The simple rules that the planner is compared with. They see every request that they placed end, at once and without
error, as a balancer in front of the workers does; heartbeats they do not need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from isthmus_planner.evaluate.fleet import WorkerSpec
from isthmus_planner.evaluate.ports import Ask, Placed, Verdict
from isthmus_shared.messages.health import RelayHeartbeat, Role, WorkerHeartbeat
from isthmus_shared.messages.outcomes import Outcome


@dataclass(slots=True)
class Rule:
    """Pools by role; where workers of one role alone exist, requests are divided between the pools."""

    name: str
    workers: Sequence[WorkerSpec]
    place: Callable[[Rule, int], Placed]
    """For a prompt of so many tokens."""
    prompt_tokens: list[int] = field(default_factory=list)
    """Under way to each worker, or computed there."""
    sequences: list[int] = field(default_factory=list)
    """Decoding on each worker, or to be."""
    placed: int = 0
    """Requests so far."""

    def __post_init__(self) -> None:
        self.prompt_tokens, self.sequences = [0] * len(self.workers), [0] * len(self.workers)

    @property
    def prefillers(self) -> list[int]:
        """Those that do nothing else; where there are none, whoever may."""
        alone = [i for i, worker in enumerate(self.workers) if worker.roles == (Role.PREFILL,)]
        return alone or [i for i, worker in enumerate(self.workers) if Role.PREFILL in worker.roles]

    @property
    def decoders(self) -> list[int]:
        return [i for i, worker in enumerate(self.workers) if Role.DECODE in worker.roles]

    @property
    def divided(self) -> bool:
        return any(worker.roles == (Role.PREFILL,) for worker in self.workers)

    def least_prompts(self, among: list[int]) -> int:
        return min(among, key=lambda i: (self.prompt_tokens[i], self.sequences[i], i))

    def least_sequences(self, among: list[int]) -> int:
        return min(among, key=lambda i: (self.sequences[i], self.prompt_tokens[i], i))

    def would_place(self, isl_tokens: int) -> Placed:
        return self.place(self, isl_tokens)

    def book(self, isl_tokens: int, placed: Placed) -> None:
        self.placed += 1
        self.prompt_tokens[placed.decode if placed.prefill is None else placed.prefill] += isl_tokens
        self.sequences[placed.decode] += 1

    def ask(self, ask: Ask, now_s: float) -> Verdict:
        placed = self.would_place(ask.isl_tokens)
        self.book(ask.isl_tokens, placed)
        return placed

    def poll(self, now_s: float) -> list[tuple[Ask, Verdict]]:
        return []

    def beat(self, index: int, beat: WorkerHeartbeat, now_s: float) -> None:
        pass

    def relay_beat(self, beat: RelayHeartbeat, now_s: float) -> None:
        pass

    def prefilled(self, index: int, isl_tokens: int) -> None:
        self.prompt_tokens[index] -= isl_tokens

    def ended(self, index: int | None, decode: int, outcome: Outcome) -> None:
        self.sequences[decode] -= 1


def round_robin(workers: Sequence[WorkerSpec]) -> Rule:
    def place(rule: Rule, tokens: int) -> Placed:
        decode = rule.decoders[rule.placed % len(rule.decoders)]
        return Placed(rule.prefillers[rule.placed % len(rule.prefillers)] if rule.divided else None, decode)

    return Rule("round-robin", workers, place)


def least_loaded(workers: Sequence[WorkerSpec]) -> Rule:
    """Fewest prompt tokens under way for prefill, fewest sequences for decode."""

    def place(rule: Rule, tokens: int) -> Placed:
        decode = rule.least_sequences(rule.decoders)
        return Placed(rule.least_prompts(rule.prefillers) if rule.divided else None, decode)

    return Rule("least-loaded", workers, place)


def threshold(workers: Sequence[WorkerSpec], isl_tokens: int) -> Rule:
    """Prompts longer than that are prefilled on another worker than they decode on; the least loaded of each."""

    def place(rule: Rule, tokens: int) -> Placed:
        decode = rule.least_sequences(rule.decoders)
        others = [i for i in rule.prefillers if i != decode]
        if tokens <= isl_tokens or not others:
            return Placed(None, decode)
        return Placed(rule.least_prompts(others), decode)

    return Rule(f"threshold {isl_tokens}", workers, place)
