"""What the rest of the planner needs to know of leadership."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Leadership(Protocol):
    @property
    def epoch(self) -> int | None:
        """That of this replica's leadership at this very moment; None: it must not assign anything.

        Asked anew before each message that assigns: it may end between two.
        """
        ...


@dataclass(frozen=True, slots=True)
class SetLeader:
    """Whether it leads is a matter of settings: no lease is held."""

    now: Callable[[], int | None]

    @property
    def epoch(self) -> int | None:
        return self.now()
