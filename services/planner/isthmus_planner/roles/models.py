"""Which worker serves which model. A slow role change: rarely, one worker of the cluster at a time. Pure.

A model's load is what arrives over what its workers can do of it, in their best division (one of them may divide its
time) and under its target between tokens. The model with the highest load is given a worker where the highest load of
all falls enough by it, for long enough, from a model that can spare it. The worker is judged once it serves the other
model: if the highest load, for the mixes of then, has not fallen by a fair share of what was predicted, it goes back
and is left alone for a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from isthmus_planner.roles.capacity import Ability, speeds
from isthmus_planner.roles.mix import Mix
from isthmus_planner.roles.split import best_split, divided_capacity
from isthmus_shared.ids import Incarnation, WorkerId
from isthmus_shared.messages.health import Role


@dataclass(frozen=True, slots=True)
class ModelPolicy:
    least_gain: float = 0.25
    """By so much of itself the highest load must fall."""
    busy: float = 0.67
    """A lower load than this is nobody's need."""
    hold_s: float = 30.0
    """So long it must have been the same model's need."""
    dwell_s: float = 300.0
    """Between two changes of one worker: weights take minutes to load."""
    confirm_s: float = 900.0
    """From the change until the worker serves the other model, at most."""
    verify_s: float = 30.0
    """From then until it is judged."""
    keep_share: float = 0.3
    """Of the fall in load that was predicted; less, and it goes back."""
    spare_workers: int = 2
    """That a model which is asked for keeps: one for each role."""


@dataclass(frozen=True, slots=True)
class ModelPool:
    """One model's workers and work."""

    model: str
    workers: tuple[Ability, ...]
    mix: Mix | None
    itl_s: float | None

    def load(self) -> float:
        """What arrives over what can be done of it."""
        if self.mix is None or not self.workers:
            return 0.0
        of_each = {worker.worker_id: speeds(worker, self.mix, self.itl_s) for worker in self.workers}
        return self.mix.rate_per_s / max(divided_capacity(self.workers, of_each), 1e-9)

    def with_worker(self, worker: Ability) -> ModelPool:
        """And one more, of which only its roles are known: it is taken to be as fast as the middle one here."""
        like = sorted(self.workers, key=lambda each: each.costs.per_prefill_token_s)[len(self.workers) // 2]
        newcomer = replace(
            like,
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            roles=worker.roles,
            able=worker.able,
            decode_seen=0,
            prefill_seen=0,
        )
        return replace(self, workers=(*self.workers, newcomer))

    def without(self, worker_id: WorkerId) -> ModelPool:
        return replace(self, workers=tuple(each for each in self.workers if each.worker_id != worker_id))


@dataclass(frozen=True, slots=True)
class ModelChange:
    """One worker's, under way."""

    worker_id: WorkerId
    incarnation: Incarnation
    model: str
    was: str
    roles: tuple[Role, ...]
    at_s: float
    before: float
    """The highest load, then and as predicted after the change."""
    after: float
    mixes: Mapping[str, Mix | None]
    back: bool = False


@dataclass(slots=True)
class Allocator:
    """`look` every second or so."""

    policy: ModelPolicy = field(default_factory=ModelPolicy)
    verdicts: list[tuple[ModelChange, str]] = field(default_factory=list)
    """Since the last `take_verdicts`."""
    _pending: ModelChange | None = None
    _confirmed_s: float | None = None
    _wish: tuple[str, str] | None = None
    _since_s: float = 0.0
    _free_s: dict[WorkerId, float] = field(default_factory=dict)
    """From when on a worker may change again."""

    @property
    def pending(self) -> ModelChange | None:
        return self._pending

    def take_verdicts(self) -> tuple[tuple[ModelChange, str], ...]:
        told, self.verdicts = tuple(self.verdicts), []
        return told

    def forget_pending(self) -> None:
        """Somebody else leads."""
        self._pending, self._confirmed_s, self._wish = None, None, None

    def look(
        self, pools: Sequence[ModelPool], loadable: Mapping[WorkerId, frozenset[str]], now_s: float
    ) -> ModelChange | None:
        """The change to ask for, now or again. `loadable`: of every live worker, ready or not, what it could load."""
        self._free_s = {key: at_s for key, at_s in self._free_s.items() if key in loadable}
        if self._pending is not None:
            return self._follow(self._pending, pools, loadable, now_s)
        found = self._wanted(pools, loadable, now_s)
        wish = None if found is None else (found.was, found.model)
        if wish is None or wish != self._wish:
            self._wish, self._since_s = wish, now_s
        if found is None or now_s - self._since_s < self.policy.hold_s:
            return None
        return self._begin(found, now_s)

    def _wanted(
        self, pools: Sequence[ModelPool], loadable: Mapping[WorkerId, frozenset[str]], now_s: float
    ) -> ModelChange | None:
        loads = {pool.model: pool.load() for pool in pools}
        if len(loads) < 2:
            return None
        needy = max(pools, key=lambda pool: (loads[pool.model], pool.model))
        highest = loads[needy.model]
        if highest < self.policy.busy:
            return None
        best: ModelChange | None = None
        for donor in pools:
            if donor is needy or len(donor.workers) <= (1 if donor.mix is None else self.policy.spare_workers):
                continue
            rest = max((loads[p.model] for p in pools if p is not donor and p is not needy), default=0.0)
            for worker in donor.workers:
                if needy.model not in loadable.get(worker.worker_id, frozenset()):
                    continue
                if now_s < self._free_s.get(worker.worker_id, 0.0):
                    continue
                more = needy.with_worker(worker)
                after = max(rest, donor.without(worker.worker_id).load(), more.load())
                if after <= highest * (1 - self.policy.least_gain) and (best is None or after < best.after):
                    best = _change(worker, donor, more, highest, after, pools, now_s)
        return best

    def _begin(self, change: ModelChange, now_s: float) -> ModelChange:
        self._pending, self._confirmed_s, self._wish = replace(change, at_s=now_s), None, None
        self._free_s[change.worker_id] = now_s + self.policy.dwell_s
        return self._pending

    def _follow(
        self,
        change: ModelChange,
        pools: Sequence[ModelPool],
        loadable: Mapping[WorkerId, frozenset[str]],
        now_s: float,
    ) -> ModelChange | None:
        if change.worker_id not in loadable:
            self._over(change, "lost")
            return None
        there = any(
            worker.incarnation == change.incarnation
            for pool in pools
            if pool.model == change.model
            for worker in pool.workers
        )
        if self._confirmed_s is None:
            if there:
                self._confirmed_s = now_s
            elif now_s - change.at_s > self.policy.confirm_s:
                self._over(change, "not obeyed")
                return None
            return None if there else change
        if now_s - self._confirmed_s < self.policy.verify_s:
            return None
        return self._judge(change, pools, now_s)

    def _judge(self, change: ModelChange, pools: Sequence[ModelPool], now_s: float) -> ModelChange | None:
        then = [replace(pool, mix=change.mixes.get(pool.model)) for pool in pools]
        realised = max((pool.load() for pool in then), default=0.0)
        worker = next((w for pool in pools for w in pool.workers if w.incarnation == change.incarnation), None)
        fell, promised = change.before - realised, change.before - change.after
        if change.back or worker is None or fell >= self.policy.keep_share * promised:
            self._over(change, "kept")
            return None
        self._over(change, "taken back")
        back = replace(change, model=change.was, was=change.model, back=True, before=realised, after=change.before)
        self._begin(back, now_s)
        self._free_s[change.worker_id] = now_s + 4 * self.policy.dwell_s
        return self._pending

    def _over(self, change: ModelChange, outcome: str) -> None:
        self._pending, self._confirmed_s = None, None
        self.verdicts.append((change, outcome))


def _change(
    worker: Ability,
    donor: ModelPool,
    more: ModelPool,
    before: float,
    after: float,
    pools: Sequence[ModelPool],
    now_s: float,
) -> ModelChange:
    """With the role that it is to have there."""
    roles = frozenset(worker.roles)
    if more.mix is not None:
        of_each = {each.worker_id: speeds(each, more.mix, more.itl_s) for each in more.workers}
        roles = best_split(more.workers, of_each)[worker.worker_id]
    return ModelChange(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        model=more.model,
        was=donor.model,
        roles=tuple(sorted(roles)),
        at_s=now_s,
        before=before,
        after=after,
        mixes={pool.model: pool.mix for pool in pools},
    )
