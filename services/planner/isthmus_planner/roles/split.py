"""The best division of workers between the roles. Pure.

Who prefills is settled by comparative advantage: sorted by what a worker can prefill over what it can decode, the first
ones prefill. So only the point of division is to be found, and types of workers that are alike end up on both sides of
at most one division.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from isthmus_planner.roles.capacity import Ability, Capacity, Roles, Speeds, capacity
from isthmus_shared.ids import WorkerId
from isthmus_shared.messages.health import Role

PREFILL, DECODE = frozenset({Role.PREFILL}), frozenset({Role.DECODE})
BOTH = PREFILL | DECODE


def current(workers: Sequence[Ability]) -> dict[WorkerId, frozenset[Role]]:
    return {worker.worker_id: frozenset(worker.roles) for worker in workers}


def covers(roles: Roles) -> bool:
    """Whether somebody prefills and somebody decodes."""
    return set().union(*roles.values()) >= BOTH if roles else False


def best_split(workers: Sequence[Ability], of_each: Mapping[WorkerId, Speeds]) -> dict[WorkerId, frozenset[Role]]:
    """The division of the greatest capacity with one worker on each side at least; of equal ones that with the fewest
    changes. Where there is no such division (one worker, or none that is flexible), roles stay or become both."""
    now = current(workers)
    flexible = sorted(
        (worker for worker in workers if worker.flexible),
        key=lambda w: (-_advantage(of_each[w.worker_id]), Role.PREFILL not in w.roles, w.worker_id),
    )
    fixed = {w.worker_id: now[w.worker_id] for w in workers if not w.flexible}
    base = capacity(of_each, fixed)
    prefill_fixed = any(Role.PREFILL in has for has in fixed.values())
    decode_fixed = any(Role.DECODE in has for has in fixed.values())
    prefill_s, decode_s = (
        base.prefill_per_s,
        base.decode_per_s + sum(of_each[w.worker_id].decode_per_s for w in flexible),
    )
    changes = sum(now[w.worker_id] != DECODE for w in flexible)
    best: tuple[float, int] | None = None
    best_count = 0
    for count in range(len(flexible) + 1):
        if count:
            moved = flexible[count - 1]
            prefill_per_s += of_each[moved.worker_id].prefill_per_s
            decode_per_s -= of_each[moved.worker_id].decode_per_s
            changes += (now[moved.worker_id] != PREFILL) - (now[moved.worker_id] != DECODE)
        if (count or prefill_fixed) and (count < len(flexible) or decode_fixed):
            rank = round(min(prefill_per_s, decode_per_s), 9), -changes
            if best is None or rank > best:
                best, best_count = rank, count
    if best is None and len(workers) == 1 and flexible:
        return {flexible[0].worker_id: BOTH}
    if best is None:
        return now
    found = {w.worker_id: PREFILL for w in flexible[:best_count]}
    return {**fixed, **found, **{w.worker_id: DECODE for w in flexible[best_count:]}}


def toward(
    workers: Sequence[Ability],
    of_each: Mapping[WorkerId, Speeds],
    wanted: Roles,
    free: frozenset[WorkerId],
) -> tuple[WorkerId, Capacity] | None:
    """Of the single changes that lead there, among workers that are `free` to change, that with the greatest capacity
    after it. Never one that leaves a side empty which is not empty now."""
    now = current(workers)
    before = capacity(of_each, now)
    holders = {role: sum(role in has for has in now.values()) for role in Role}
    best: tuple[float, WorkerId, Capacity] | None = None
    for key in sorted(free & {key for key, has in wanted.items() if has != now[key]}):
        given_up = [role for role in now[key] - wanted[key] if holders[role] == 1]
        if given_up:
            continue  # it would leave that side empty
        then = _changed(before, of_each[key], now[key], wanted[key])
        if best is None or then.per_s > best[0]:
            best = then.per_s, key, then
    return None if best is None else best[1:]


def _changed(before: Capacity, worker: Speeds, had: frozenset[Role], has: frozenset[Role]) -> Capacity:
    def of(role: Role, roles: frozenset[Role]) -> float:
        return worker.of(role) / len(roles) if role in roles else 0.0

    return Capacity(
        before.prefill_per_s + of(Role.PREFILL, has) - of(Role.PREFILL, had),
        before.decode_per_s + of(Role.DECODE, has) - of(Role.DECODE, had),
    )


def _advantage(worker: Speeds) -> float:
    return worker.prefill_per_s / worker.decode_per_s
