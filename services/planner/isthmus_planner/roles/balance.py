"""When a model's workers change roles: with hysteresis, one at a time, and looked at afterwards. Pure.

A change is made when the best division would serve enough more of what is asked for (`least_gain`, after the cost of
switching), and has been pointing the same way for `hold_s`. Then one worker changes: the one that brings most. Its new
role must show in its heartbeat; after that it is judged: with what its steps in the new role were seen to cost, and for
the mix that the change was decided for, the change must bring a fair share of what was predicted, or it is taken back
and that worker is left alone for a while. Only then comes the next change.

Two things keep it from flapping when the mix oscillates: a worker that has changed keeps its role for `dwell_s`; and a
model's change in one direction is not followed by one in the other within `dwell_s`, which doubles each time that the
directions alternate too soon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from isthmus_planner.roles.capacity import Ability, Roles, Speeds, capacity, speeds
from isthmus_planner.roles.mix import Kind, Mix
from isthmus_planner.roles.split import best_split, covers, current, one_way, toward
from isthmus_shared.ids import Incarnation, WorkerId
from isthmus_shared.messages.health import Role

SWAP_HOLDS = 3
"""Times as long must workers have stood the wrong way round before two are exchanged."""
PLAIN = Mix(rate_per_s=0.0, kinds=(Kind(isl_tokens=1024, cached_tokens=0, osl_tokens=256, weight=1.0),))
"""What is divided for while nobody has asked for anything."""


@dataclass(frozen=True, slots=True)
class BalancePolicy:
    least_gain: float = 0.10
    """Of the requests served; less is not worth a change."""
    swap_gain: float = 0.30
    """The same where workers change in both directions: that rests on how two of them differ, which is known less well,
    and its first half is most often one for the worse."""
    hold_s: float = 8.0
    """So long the wish must have lasted, in one direction; half of that without it ends it (rates are noisy)."""
    dwell_s: float = 60.0
    """Between two changes of one worker, and between changes of a model in opposite directions."""
    max_dwell_s: float = 1920.0
    headroom: float = 1.5
    """Capacity beyond so many times what arrives is of no use: with less load than that nothing is changed."""
    switch_s: float = 10.0
    """Of a worker's time that a change costs: it ends what it has and fills anew."""
    horizon_s: float = 120.0
    """A mix is expected to last so long; a change must pay for itself within it."""
    cover_s: float = 3.0
    """So long a side must have had nobody: one that only starts anew is back sooner."""
    confirm_s: float = 20.0
    """A worker that does not show its new role by then will not: it is left alone."""
    verify_s: float = 3.0
    """From the confirmed change until it is judged, at least."""
    verify_most_s: float = 10.0
    """The same, at most: by then the worker's steps in the new role are known, or there is nothing to be learned."""
    verify_steps: int = 8
    """Steps in the new role after which it may be judged."""
    keep_share: float = 0.3
    """Of the gain in capacity that was predicted for a change; one that brings less is taken back."""
    regret_s: float = 120.0
    """A worker whose change was taken back, or that did not obey, is left alone for so long; doubled each time."""


class Why(Enum):
    DEMAND = "demand"
    COVERAGE = "coverage"
    """A side had nobody."""
    BACK = "back"
    """The change before was none for the better."""


@dataclass(frozen=True, slots=True)
class Change:
    """One worker's, under way."""

    worker_id: WorkerId
    incarnation: Incarnation
    roles: frozenset[Role]
    was: frozenset[Role]
    why: Why
    at_s: float
    before_per_s: float
    after_per_s: float
    """Capacity, as predicted for `mix`."""
    mix: Mix | None
    itl_s: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a change."""

    change: Change
    outcome: str
    """`kept`, `taken back`, `not obeyed` or `lost`."""
    realised_per_s: float | None
    """Capacity, by what was seen since."""


@dataclass(slots=True)
class _Pending:
    change: Change
    confirmed_s: float | None = None
    seen: int = 0
    """Steps of the new kind that were known when it was confirmed."""


@dataclass(slots=True)
class Balancer:
    """One model's. `look` every second or so."""

    policy: BalancePolicy = field(default_factory=BalancePolicy)
    verdicts: list[Verdict] = field(default_factory=list)
    """Since the last `take_verdicts`."""
    _pending: _Pending | None = None
    _leaning: int = 0
    _since_s: float = 0.0
    _wished_s: float = 0.0
    _uncovered_s: float | None = None
    _changed_s: dict[WorkerId, float] = field(default_factory=dict)
    _regret: dict[WorkerId, tuple[float, float]] = field(default_factory=dict)
    """Left alone until, and for how long the next time."""
    _direction: int = 0
    _direction_s: float = 0.0
    _alternations: int = 0

    @property
    def pending(self) -> Change | None:
        return None if self._pending is None else self._pending.change

    def take_verdicts(self) -> tuple[Verdict, ...]:
        told, self.verdicts = tuple(self.verdicts), []
        return told

    def forget_pending(self) -> None:
        """Somebody else leads: what was under way is theirs to see."""
        self._pending, self._leaning = None, 0

    def look(self, workers: Sequence[Ability], mix: Mix | None, itl_s: float | None, now_s: float) -> Change | None:
        """The change to ask for now, or to ask for again since it does not show yet."""
        self._forget_gone(workers)
        if self._pending is not None:
            return self._follow(self._pending, workers, now_s)
        roles = current(workers)
        if len(workers) > 1 and not covers(roles):
            self._uncovered_s = now_s if self._uncovered_s is None else self._uncovered_s
            waited_s = now_s - self._uncovered_s
            return self._cover(workers, mix, itl_s, now_s) if waited_s >= self.policy.cover_s else None
        self._uncovered_s = None
        if mix is None:
            self._leaning = 0
            return None
        return self._balance(workers, mix, itl_s, now_s)

    def check_invariants(self) -> None:
        assert 0 <= self._alternations <= 64
        if self._pending is not None:
            assert self._pending.change.roles != self._pending.change.was

    # -- a change to make

    def _balance(self, workers: Sequence[Ability], mix: Mix, itl_s: float | None, now_s: float) -> Change | None:
        of_each = {worker.worker_id: speeds(worker, mix, itl_s) for worker in workers}
        roles, now = current(workers), capacity(of_each, current(workers))
        wanted = self._wanted(workers, roles, of_each, mix)
        if wanted is None:
            if now_s - self._wished_s > self.policy.hold_s / 2:
                self._leaning = 0
            return None
        self._wished_s, direction = now_s, _direction(roles, wanted)
        if self._leaning != _lean(direction):
            self._leaning, self._since_s = _lean(direction), now_s
        swap, free = _is_swap(roles, wanted), self._free(workers, now_s)
        hold_s = self.policy.hold_s * (SWAP_HOLDS if swap else 1)
        if now_s - self._since_s < hold_s or self._too_soon(direction, now_s):
            return None
        if swap and not free.issuperset(key for key, has in wanted.items() if has != roles[key]):
            return None
        found = toward(workers, of_each, wanted, free)
        if found is None:
            return None
        worker_id, then = found
        if then.per_s <= now.per_s and not swap:
            return None
        if not swap:
            self._note_direction(direction, now_s)
        return self._begin(worker_id, workers, wanted[worker_id], Why.DEMAND, now.per_s, then.per_s, mix, itl_s, now_s)

    def _wanted(
        self, workers: Sequence[Ability], roles: Roles, of_each: Mapping[WorkerId, Speeds], mix: Mix
    ) -> Roles | None:
        """A division that pays: by changes in one direction, or else by exchanges too."""
        now = capacity(of_each, roles)
        for wanted in (one_way(workers, of_each), best_split(workers, of_each)):
            best = capacity(of_each, wanted)
            if wanted != roles and self._pays(now.per_s, best.per_s, roles, wanted, of_each, mix):
                return wanted
        return None

    def _pays(
        self,
        now_per_s: float,
        best_per_s: float,
        roles: Roles,
        wanted: Roles,
        of_each: Mapping[WorkerId, Speeds],
        mix: Mix,
    ) -> bool:
        """Whether what more is served, while the mix lasts, is worth what the changes cost."""
        policy = self.policy
        useful = policy.headroom * mix.rate_per_s
        served, better = min(now_per_s, useful), min(best_per_s, useful)
        least = policy.swap_gain if _is_swap(roles, wanted) else policy.least_gain
        if better < served * (1 + least) or better <= 0:
            return False
        lost_per_s = sum(
            served - min(capacity(of_each, {**roles, key: frozenset()}).per_s, useful)
            for key, had in roles.items()
            if wanted[key] != had
        )
        return (better - served) * policy.horizon_s > lost_per_s * policy.switch_s

    def _cover(self, workers: Sequence[Ability], mix: Mix | None, itl_s: float | None, now_s: float) -> Change | None:
        """A side has nobody: at once, whatever was changed before. Without a mix, by what a plain request costs."""
        plain = mix or PLAIN
        of_each = {worker.worker_id: speeds(worker, plain, itl_s) for worker in workers}
        wanted = best_split(workers, of_each)
        free = frozenset(w.worker_id for w in workers if now_s >= self._regret.get(w.worker_id, (0.0, 0.0))[0])
        found = toward(workers, of_each, wanted, free)
        if found is None:
            return None
        worker_id, then = found
        before = capacity(of_each, current(workers)).per_s
        return self._begin(worker_id, workers, wanted[worker_id], Why.COVERAGE, before, then.per_s, None, itl_s, now_s)

    def _begin(
        self,
        worker_id: WorkerId,
        workers: Sequence[Ability],
        roles: frozenset[Role],
        why: Why,
        before_per_s: float,
        after_per_s: float,
        mix: Mix | None,
        itl_s: float | None,
        now_s: float,
    ) -> Change:
        worker = next(worker for worker in workers if worker.worker_id == worker_id)
        was = frozenset(worker.roles)
        change = Change(worker_id, worker.incarnation, roles, was, why, now_s, before_per_s, after_per_s, mix, itl_s)
        self._pending = _Pending(change)
        self._changed_s[worker_id] = now_s
        return change

    # -- a change under way

    def _follow(self, pending: _Pending, workers: Sequence[Ability], now_s: float) -> Change | None:
        change, policy = pending.change, self.policy
        worker = next((w for w in workers if w.incarnation == change.incarnation), None)
        if worker is None:
            self._over(change, "lost", None)
            return None
        if pending.confirmed_s is None:
            if frozenset(worker.roles) != change.roles:
                if now_s - change.at_s < policy.confirm_s:
                    return change
                self._leave_alone(change.worker_id, now_s)
                self._over(change, "not obeyed", None)
                return None
            pending.confirmed_s, pending.seen = now_s, _seen(worker, change)
        waited_s = now_s - pending.confirmed_s
        known = _seen(worker, change) - pending.seen >= policy.verify_steps
        if waited_s < policy.verify_s or (not known and waited_s < policy.verify_most_s):
            return None
        return self._judge(change, workers, now_s)

    def _judge(self, change: Change, workers: Sequence[Ability], now_s: float) -> Change | None:
        """By the mix it was decided for, so that a mix that has turned since is no reason to take it back."""
        if change.mix is None or change.why is Why.BACK:
            self._over(change, "kept", None)
            return None
        of_each = {worker.worker_id: speeds(worker, change.mix, change.itl_s) for worker in workers}
        roles = current(workers)
        realised = capacity(of_each, roles).per_s
        without = {**roles, change.worker_id: change.was}
        if not covers(without) or change.after_per_s <= change.before_per_s:
            self._over(change, "kept", realised)  # one half of a swap: the other half makes it good
            return None
        gained, promised = realised - capacity(of_each, without).per_s, change.after_per_s - change.before_per_s
        if gained >= self.policy.keep_share * promised:
            self._regret.pop(change.worker_id, None)
            self._over(change, "kept", realised)
            return None
        self._over(change, "taken back", realised)
        self._leave_alone(change.worker_id, now_s)
        before = capacity(of_each, without).per_s
        return self._begin(
            change.worker_id, workers, change.was, Why.BACK, realised, before, change.mix, change.itl_s, now_s
        )

    def _over(self, change: Change, outcome: str, realised_per_s: float | None) -> None:
        self._pending = None
        self.verdicts.append(Verdict(change, outcome, realised_per_s))

    # -- who may change, and when

    def _free(self, workers: Sequence[Ability], now_s: float) -> frozenset[WorkerId]:
        policy = self.policy
        return frozenset(
            worker.worker_id
            for worker in workers
            if worker.flexible
            and now_s - self._changed_s.get(worker.worker_id, -policy.dwell_s) >= policy.dwell_s
            and now_s >= self._regret.get(worker.worker_id, (0.0, 0.0))[0]
        )

    def _leave_alone(self, worker_id: WorkerId, now_s: float) -> None:
        _, for_s = self._regret.get(worker_id, (0.0, self.policy.regret_s))
        self._regret[worker_id] = now_s + for_s, min(2 * for_s, self.policy.max_dwell_s)

    def _calm_s(self) -> float:
        return min(self.policy.dwell_s * 2.0**self._alternations, self.policy.max_dwell_s)

    def _too_soon(self, direction: int, now_s: float) -> bool:
        return direction * self._direction < 0 and now_s - self._direction_s < self._calm_s()

    def _note_direction(self, direction: int, now_s: float) -> None:
        if direction * self._direction < 0:
            soon = now_s - self._direction_s < 2 * self._calm_s()
            self._alternations = min(64, self._alternations + 1) if soon else max(0, self._alternations - 1)
        if direction:
            self._direction, self._direction_s = direction, now_s

    def _forget_gone(self, workers: Sequence[Ability]) -> None:
        here = {worker.worker_id for worker in workers}
        self._changed_s = {key: at_s for key, at_s in self._changed_s.items() if key in here}
        self._regret = {key: until for key, until in self._regret.items() if key in here}


def _seen(worker: Ability, change: Change) -> int:
    return worker.prefill_seen if Role.PREFILL in change.roles else worker.decode_seen


def _lean(direction: int) -> int:
    """A number for each direction that is not 0, which stands for no wish at all."""
    return direction or 2


def _sign(was: frozenset[Role], roles: frozenset[Role]) -> int:
    return (Role.PREFILL in roles) - (Role.PREFILL in was) - (Role.DECODE in roles) + (Role.DECODE in was)


def _direction(now: Roles, wanted: Roles) -> int:
    """1: more prefill, -1: more decode, 0: the same workers, differently placed."""
    balance = sum(_sign(now[key], wanted[key]) for key in wanted)
    return (balance > 0) - (balance < 0)


def _is_swap(now: Roles, wanted: Roles) -> bool:
    """Whether workers change in both directions: then the first of two changes may be one for the worse."""
    signs = {_sign(now[key], wanted[key]) for key in wanted}
    return any(sign > 0 for sign in signs) and any(sign < 0 for sign in signs)
