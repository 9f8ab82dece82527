"""The best division of workers between the roles. Pure.

Who prefills is settled by comparative advantage: sorted by what a worker can prefill over what it can decode, the first
ones prefill, and the point of division is where the shorter side is longest. Workers are whole, so a few of different
kinds may then still be better exchanged; that is tried until it helps no more.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from isthmus_planner.roles.capacity import Ability, Capacity, Roles, Speeds, capacity
from isthmus_shared.ids import WorkerId
from isthmus_shared.messages.health import Role

PREFILL, DECODE = frozenset({Role.PREFILL}), frozenset({Role.DECODE})
BOTH = PREFILL | DECODE
MAX_EXCHANGES = 32
MAX_KINDS = 12
"""Both bound the work: of so many kinds, 5,000 exchanges are weighed at most, in some milliseconds."""
WORTH_IT = 0.02
"""Of the capacity: a lesser gain is not worth an exchange."""


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
    prefill_per_s = base.prefill_per_s
    decode_per_s = base.decode_per_s + sum(of_each[w.worker_id].decode_per_s for w in flexible)
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
    found |= {w.worker_id: DECODE for w in flexible[best_count:]}
    return _exchanged({**fixed, **found}, frozenset(found), of_each)


def one_way(workers: Sequence[Ability], of_each: Mapping[WorkerId, Speeds]) -> dict[WorkerId, frozenset[Role]]:
    """The division that is reached by moving workers to the shorter side only, those first that are best at it, as long
    as the capacity grows by it. It does not rest on how workers of one side compare, as an exchange does."""
    roles, now = current(workers), capacity(of_each, current(workers))
    to = frozenset({now.short})
    away = BOTH - to
    movable = sorted(
        (worker for worker in workers if worker.flexible and roles[worker.worker_id] == away),
        key=lambda w: (_advantage(of_each[w.worker_id]) * (-1 if to == PREFILL else 1), w.worker_id),
    )
    left = sum(bool(has & away) for has in roles.values())
    for worker in movable:
        then = _changed(now, of_each[worker.worker_id], away, to)
        if left == 1 or then.per_s <= now.per_s:
            break
        roles[worker.worker_id], now, left = to, then, left - 1
    return roles


def divided_capacity(workers: Sequence[Ability], of_each: Mapping[WorkerId, Speeds]) -> float:
    """Requests per second of the best division in which one worker may divide its time between the roles: what the
    workers are worth together, before they have been rounded to whole ones."""
    flexible = sorted((w for w in workers if w.flexible), key=lambda w: -_advantage(of_each[w.worker_id]))
    base = capacity(of_each, {w.worker_id: frozenset(w.roles) for w in workers if not w.flexible})
    prefill_per_s = base.prefill_per_s
    decode_per_s = base.decode_per_s + sum(of_each[w.worker_id].decode_per_s for w in flexible)
    for worker in flexible:
        speed = of_each[worker.worker_id]
        share = (decode_per_s - prefill_per_s) / (speed.prefill_per_s + speed.decode_per_s)
        if share < 1:
            return prefill_per_s + max(0.0, share) * speed.prefill_per_s
        prefill_per_s += speed.prefill_per_s
        decode_per_s -= speed.decode_per_s
    return min(prefill_per_s, decode_per_s)


def _exchanged(
    roles: dict[WorkerId, frozenset[Role]], flexible: frozenset[WorkerId], of_each: Mapping[WorkerId, Speeds]
) -> dict[WorkerId, frozenset[Role]]:
    """With one worker moved, or two of different kinds exchanged, as long as the capacity grows by it."""
    for _ in range(MAX_EXCHANGES):
        now = capacity(of_each, roles)
        sides: dict[frozenset[Role], list[WorkerId | None]] = {
            side: [None, *_of_kinds(roles, flexible, side, of_each)] for side in (PREFILL, DECODE)
        }
        best: tuple[float, dict[WorkerId, frozenset[Role]]] = (now.per_s * (1 + WORTH_IT), {})
        for gives, takes in itertools.product(sides[PREFILL], sides[DECODE]):
            moved = {key: has for key, has in ((gives, DECODE), (takes, PREFILL)) if key is not None}
            then = now
            for key, has in moved.items():
                then = _changed(then, of_each[key], roles[key], has)
            if then.per_s > best[0] and covers({**roles, **moved}):
                best = then.per_s, moved
        if not best[1]:
            break
        roles = {**roles, **best[1]}
    return roles


def _of_kinds(
    roles: Roles, flexible: frozenset[WorkerId], side: frozenset[Role], of_each: Mapping[WorkerId, Speeds]
) -> list[WorkerId]:
    """One of each kind of worker on that side; kinds are told apart by what they can do, to two digits."""
    kinds: dict[tuple[str, str], WorkerId] = {}
    for key in sorted(flexible):
        if roles[key] == side and len(kinds) < MAX_KINDS:
            kinds.setdefault((f"{of_each[key].prefill_per_s:.1e}", f"{of_each[key].decode_per_s:.1e}"), key)
    return list(kinds.values())


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
