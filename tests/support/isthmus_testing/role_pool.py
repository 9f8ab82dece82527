"""A pool of workers that do as a `Balancer` says, second by second, under a mix that a test draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from isthmus_planner.cost.online import StepCosts
from isthmus_planner.roles.balance import BalancePolicy, Balancer, Change, Why
from isthmus_planner.roles.capacity import Ability, capacity, speeds
from isthmus_planner.roles.mix import MixMeter
from isthmus_planner.roles.split import best_split, covers, current
from isthmus_shared.ids import Incarnation, RequestId, WorkerId
from isthmus_shared.messages.health import Role

COSTS = StepCosts(base_s=0.006, per_sequence_s=30e-6, per_kv_token_s=50e-9, per_prefill_token_s=200e-6)
EITHER = frozenset({Role.PREFILL, Role.DECODE})
ITL_S = 0.02

Shape = tuple[int, int]
"""Prompt and answer, tokens."""
LONG_IN, LONG_OUT = (8192, 1024), (1024, 8192)


def ability(
    name: str, role: Role, *, able: frozenset[Role] = EITHER, prefill: float = 1.0, decode: float = 1.0
) -> Ability:
    """`prefill` and `decode`: times as fast as the plain one."""
    costs = StepCosts(
        COSTS.base_s / decode,
        COSTS.per_sequence_s / decode,
        COSTS.per_kv_token_s / decode,
        COSTS.per_prefill_token_s / prefill,
    )
    life = Incarnation(f"{name}-life")
    return Ability(WorkerId(name), life, (role,), able, costs, chunk_tokens=512, kv_tokens=400_000, max_batch=64)


@dataclass
class RolePool:
    workers: list[Ability]
    rate_per_s: float
    shape: Callable[[float], Shape]
    policy: BalancePolicy = field(default_factory=BalancePolicy)
    obey: Callable[[Change], bool] = lambda change: True
    learn: Callable[[Ability], Ability] = lambda worker: worker
    """What a worker's steps in its new role teach."""
    now_s: float = 0.0
    asked: list[Change] = field(default_factory=list)
    """Each change once."""
    outcomes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.balancer = Balancer(self.policy)
        self._meter = MixMeter()
        self._owed = 0.0
        self._number = 0
        self._doing: tuple[float, Change] | None = None

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.second()

    def run_until_asked(self) -> Change:
        while not self.asked:
            assert self.now_s < 120, "nothing is asked for"
            self.second()
        return self.asked[-1]

    def second(self) -> None:
        self.now_s += 1.0
        self._arrive()
        self._carry_out()
        mix = self._meter.mix("m", self.now_s)
        change = self.balancer.look(self.workers, mix, ITL_S, self.now_s)
        self.balancer.check_invariants()
        self.outcomes += [verdict.outcome for verdict in self.balancer.take_verdicts()]
        if change is None:
            return
        if not self.asked or self.asked[-1] is not change:
            self.asked.append(change)
            if (change.why is not Why.BACK and self.obey(change)) or change.why is Why.BACK:
                self._doing = self.now_s + 1.0, change

    @property
    def demanded(self) -> list[Change]:
        return [change for change in self.asked if change.why is Why.DEMAND]

    @property
    def prefills(self) -> int:
        return sum(Role.PREFILL in worker.roles for worker in self.workers)

    def share_of_best(self, shape: Shape) -> float:
        """Capacity for requests of that shape, of the most that these workers could have."""
        meter = MixMeter()
        meter.arrived(RequestId("r"), "m", isl_tokens=shape[0], max_osl_tokens=shape[1], now_s=0.0)
        mix = meter.mix("m", 0.0)
        assert mix is not None
        of_each = {worker.worker_id: speeds(worker, mix, ITL_S) for worker in self.workers}
        best = capacity(of_each, best_split(self.workers, of_each)).per_s
        return capacity(of_each, current(self.workers)).per_s / best

    def _arrive(self) -> None:
        isl, osl = self.shape(self.now_s)
        self._owed += self.rate_per_s
        while self._owed >= 1:
            self._owed -= 1
            self._number += 1
            name = RequestId(f"r{self._number}")
            self._meter.arrived(name, "m", isl_tokens=isl, max_osl_tokens=osl, now_s=self.now_s)

    def _carry_out(self) -> None:
        had = covers(current(self.workers))
        if self._doing is not None and self.now_s >= self._doing[0]:
            _, change = self._doing
            self._doing = None
            self.workers = [
                self.learn(replace(w, roles=tuple(sorted(change.roles)))) if w.worker_id == change.worker_id else w
                for w in self.workers
            ]
            assert covers(current(self.workers)) or not had, "a side was left empty"
        self.workers = [
            replace(
                worker,
                decode_seen=worker.decode_seen + 5 * (Role.DECODE in worker.roles),
                prefill_seen=worker.prefill_seen + 5 * (Role.PREFILL in worker.roles),
            )
            for worker in self.workers
        ]


def division(prefill: int, decode: int) -> list[Ability]:
    """So many plain workers in each role."""
    return [ability(f"p{n}", Role.PREFILL) for n in range(prefill)] + [
        ability(f"d{n}", Role.DECODE) for n in range(decode)
    ]
