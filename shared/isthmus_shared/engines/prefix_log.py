"""Which prefixes an engine has in its cache, as it tells others of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_CHANGES = 65_536
"""Not yet taken: what 4 million tokens make and lose. Somebody takes them several times a second; if nobody does, they
are given up, and a snapshot says it all."""


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """Since the last taking. Each hash (8 bytes, see `isthmus_shared.prefix`) is in at most one of the two."""

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    complete: bool
    """False: some were given up, and only a snapshot tells what is there."""

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or not self.complete)


class PrefixLog:
    """Counts the blocks behind each prefix: a prefix may end in the middle of several of them."""

    def __init__(self, *, max_changes: int = MAX_CHANGES) -> None:
        self._max_changes = max_changes
        self._blocks: dict[bytes, int] = {}
        self._changes: dict[bytes, bool] = {}
        self._complete = True

    def stored(self, prefixes: Sequence[bytes]) -> None:
        for prefix in prefixes:
            count = self._blocks.get(prefix, 0)
            self._blocks[prefix] = count + 1
            if not count:
                self._note(prefix, there=True)

    def removed(self, prefixes: Sequence[bytes]) -> None:
        for prefix in prefixes:
            count = self._blocks[prefix] - 1
            if count:
                self._blocks[prefix] = count
            else:
                del self._blocks[prefix]
                self._note(prefix, there=False)

    def take(self) -> PrefixChanges:
        """What is to be told; it counts as told."""
        changes, self._changes = self._changes, {}
        complete, self._complete = self._complete, True
        stored = tuple(prefix for prefix, there in changes.items() if there)
        return PrefixChanges(stored, tuple(prefix for prefix, there in changes.items() if not there), complete)

    def snapshot(self, limit: int) -> tuple[bytes, ...]:
        """At most `limit` of those that are there. A prefix comes after the shorter ones that it goes on from."""
        return tuple(prefix for prefix, _ in zip(self._blocks, range(limit), strict=False))

    @property
    def pending(self) -> bool:
        """Whether there is something to take."""
        return bool(self._changes) or not self._complete

    def __len__(self) -> int:
        return len(self._blocks)

    def _note(self, prefix: bytes, *, there: bool) -> None:
        if self._changes.pop(prefix, there) is not there:
            return  # come and gone, or gone and come again: nothing to tell
        self._changes[prefix] = there
        if len(self._changes) > self._max_changes:
            self._changes.clear()
            self._complete = False
