"""Work routed since a worker's last beat, so that a burst does not all go to the one that looked idle. Pure.

One account for each life, so that an assignment and a beat cost the same however many workers there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from isthmus_planner.cost.speeds import Pending
from isthmus_shared.ids import Incarnation

SETTLE_S = 0.05
"""A beat shows an assignment once it was on its way this long: route reply, submit and admission take milliseconds."""
EXPIRY_S = 5.0
"""An assignment that no beat has covered by then is forgotten: its ingress may never have submitted it."""
MAX_ASSIGNMENTS = 16_384
"""Of one worker: five seconds of 3,000 routes per second to it alone; beyond that its oldest are forgotten first."""
NOTHING = Pending()


@dataclass(slots=True)
class _Account:
    open: deque[tuple[float, Pending]] = field(default_factory=deque)
    """(when, what), oldest first."""
    sum: Pending = NOTHING


class Ledger:
    def __init__(self) -> None:
        self._accounts: dict[Incarnation, _Account] = {}

    def __len__(self) -> int:
        """Assignments that are open."""
        return sum(len(account.open) for account in self._accounts.values())

    def add(self, incarnation: Incarnation, work: Pending, now_s: float) -> Pending:
        """Returns what that worker now has pending in all."""
        account = self._accounts.get(incarnation)
        if account is None:
            account = self._accounts[incarnation] = _Account()
        account.open.append((now_s, work))
        account.sum = _plus(account.sum, work, 1)
        if len(account.open) > MAX_ASSIGNMENTS:
            account.sum = _plus(account.sum, account.open.popleft()[1], -1)
        self._drop(account, now_s - EXPIRY_S)
        return account.sum

    def beat(self, incarnation: Incarnation, now_s: float) -> Pending:
        """That worker's load is fresh: what it was given before now is in it. Returns what is not."""
        account = self._accounts.get(incarnation)
        if account is None:
            return NOTHING
        self._drop(account, now_s - SETTLE_S)
        if not account.open:
            del self._accounts[incarnation]
        return account.sum

    def forget(self, incarnation: Incarnation) -> None:
        self._accounts.pop(incarnation, None)

    def keep(self, alive: Iterable[Incarnation]) -> None:
        """Drops the accounts of all others."""
        wanted = set(alive)
        self._accounts = {life: account for life, account in self._accounts.items() if life in wanted}

    def pending(self, incarnation: Incarnation) -> Pending:
        account = self._accounts.get(incarnation)
        return NOTHING if account is None else account.sum

    def check_invariants(self) -> None:
        for account in self._accounts.values():
            works = [work for _, work in account.open]
            assert account.sum.prefill_tokens == sum(work.prefill_tokens for work in works)
            assert account.sum.sequences == sum(work.sequences for work in works)
            assert account.sum.kv_blocks == sum(work.kv_blocks for work in works)
            assert len(works) <= MAX_ASSIGNMENTS

    @staticmethod
    def _drop(account: _Account, until_s: float) -> None:
        """Those from before `until_s`."""
        while account.open and account.open[0][0] <= until_s:
            account.sum = _plus(account.sum, account.open.popleft()[1], -1)


def _plus(had: Pending, work: Pending, sign: int) -> Pending:
    return Pending(
        prefill_tokens=had.prefill_tokens + sign * work.prefill_tokens,
        sequences=had.sequences + sign * work.sequences,
        kv_blocks=had.kv_blocks + sign * work.kv_blocks,
    )
