"""What workers can do of a mix in each role: expectations over the mix, not of mean lengths. Pure.

A prefill worker spends `E[T_prefill(ISL)]` on a request. A decode worker spends `E[OSL] · τ(B*, B* · ctx) / B*`: its
step's time shared by the largest batch whose step meets the target between tokens and whose KV fits. The system's
capacity is that of its shorter side. Source: the project's cost model, rules 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from isthmus_planner.cost.online import StepCosts
from isthmus_planner.roles.mix import Mix
from isthmus_shared.ids import Incarnation, WorkerId
from isthmus_shared.messages.health import Role

KV_SHARE = 0.9
"""Of the cache that decoding sequences may hold on the average; the rest is room for what varies."""
MAX_BATCH = 256
"""Where a worker does not say how many sequences it runs at once."""
LEAST_S = 1e-6


@dataclass(frozen=True, slots=True)
class Ability:
    """One worker, as far as roles go."""

    worker_id: WorkerId
    incarnation: Incarnation
    roles: tuple[Role, ...]
    """That it shows now."""
    able: frozenset[Role]
    costs: StepCosts
    chunk_tokens: int
    """Prompt tokens in one of its steps, at most."""
    kv_tokens: int
    """That its cache holds."""
    max_batch: int = 0
    """0: not known."""
    decode_seen: int = 0
    prefill_seen: int = 0
    """Steps of a kind that `costs` rest on."""

    @property
    def flexible(self) -> bool:
        return {Role.PREFILL, Role.DECODE} <= self.able


Roles = Mapping[WorkerId, frozenset[Role]]
"""Who has which; a worker with both halves its time."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Requests of a mix per second that one worker can do, by role."""

    prefill_per_s: float
    decode_per_s: float
    batch: int
    """Sequences that the second figure rests on."""

    def of(self, role: Role) -> float:
        return self.prefill_per_s if role is Role.PREFILL else self.decode_per_s


def speeds(worker: Ability, mix: Mix, itl_s: float | None) -> Speeds:
    """`itl_s` None: no target between tokens, and the cache alone bounds the batch."""
    batch = decode_batch(worker, mix, itl_s)
    step_s = worker.costs.step_s(batch, batch * mix.context_tokens)
    return Speeds(
        prefill_per_s=1.0 / max(LEAST_S, prefill_s(worker, mix)),
        decode_per_s=batch / max(LEAST_S, mix.osl_tokens * step_s),
        batch=batch,
    )


def prefill_s(worker: Ability, mix: Mix) -> float:
    """Mean over the mix, of a prompt that has the worker to itself."""
    steps, tokens = mix.prefill(max(worker.chunk_tokens, 1))
    return steps * worker.costs.base_s + tokens * worker.costs.per_prefill_token_s


def decode_batch(worker: Ability, mix: Mix, itl_s: float | None) -> int:
    """The largest one that meets the target and fits; one at least, however slow a single sequence is."""
    context = max(1.0, mix.context_tokens)
    bounds = [float(worker.max_batch or MAX_BATCH), KV_SHARE * worker.kv_tokens / context]
    each_s = worker.costs.per_sequence_s + context * worker.costs.per_kv_token_s
    if itl_s is not None and each_s > 0:
        bounds.append((itl_s - worker.costs.base_s) / each_s)
    return max(1, int(min(bounds)))


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of a set of workers in their roles, requests per second."""

    prefill_per_s: float
    decode_per_s: float

    @property
    def per_s(self) -> float:
        return min(self.prefill_per_s, self.decode_per_s)

    @property
    def short(self) -> Role:
        """The side that bounds it."""
        return Role.PREFILL if self.prefill_per_s < self.decode_per_s else Role.DECODE


def capacity(of_each: Mapping[WorkerId, Speeds], roles: Roles) -> Capacity:
    sums = {Role.PREFILL: 0.0, Role.DECODE: 0.0}
    for worker_id, has in roles.items():
        for role in has:
            sums[role] += of_each[worker_id].of(role) / len(has)
    return Capacity(sums[Role.PREFILL], sums[Role.DECODE])
