"""Keeps up with each worker's prefix events: numbers in order, a snapshot where one is missing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from isthmus_planner.prefix.index import PrefixIndex
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.health import WorkerHeartbeat
from isthmus_shared.messages.prefix import PrefixEvents, PrefixSnapshot
from isthmus_shared.messages.route import PREFIX_HASH_BYTES
from isthmus_shared.messages.work import WorkerRef

MAX_HELD_BACK = 64
"""Events of one worker that wait for its snapshot: six seconds' worth. Beyond that another snapshot follows."""


@dataclass(slots=True)
class _Followed:
    sequence: int = 0
    """Of the last event in the index; a new life begins with 0 and an empty cache."""
    told: int | None = None
    """The number in its last heartbeat."""
    asked: bool = False
    """A snapshot is under way."""
    held_back: list[PrefixEvents] = field(default_factory=list)


class Following:
    """`beat` and `events` return whether to ask the worker for a snapshot; `snapshot` or `gave_up` must follow."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self._followed: dict[Incarnation, _Followed] = {}

    def beat(self, beat: WorkerHeartbeat) -> bool:
        """Events may be a little behind the beat that tells of them, never a whole one."""
        followed = self._of(beat.incarnation)
        due = beat.prefix_sequence if followed.told is None else followed.told
        followed.told = beat.prefix_sequence
        return followed.sequence < due and self._ask(followed)

    def events(self, message: PrefixEvents) -> bool:
        followed = self._of(message.worker.incarnation)
        if followed.asked:
            if len(followed.held_back) < MAX_HELD_BACK:
                followed.held_back.append(message)
            return False
        return not self._take(message, followed) and self._ask(followed)

    def snapshot(self, worker: WorkerRef, snapshot: PrefixSnapshot) -> bool:
        """Takes it in, and what came meanwhile; returns whether to ask again."""
        followed = self._followed.get(worker.incarnation)
        if followed is None:
            return False  # dead by now
        followed.asked, followed.sequence = False, snapshot.sequence
        self.index.replace(worker.incarnation, _unpacked(snapshot.hashes))
        waited, followed.held_back = followed.held_back, []
        return not all(self._take(message, followed) for message in waited) and self._ask(followed)

    def gave_up(self, worker: WorkerRef) -> None:
        """No snapshot came: a later beat asks again."""
        followed = self._followed.get(worker.incarnation)
        if followed is not None:
            followed.asked = False
            followed.held_back.clear()

    def keep(self, alive: Iterable[Incarnation]) -> None:
        """Forgets everyone else."""
        for life in self._followed.keys() - set(alive):
            del self._followed[life]
            self.index.forget(life)

    def _take(self, message: PrefixEvents, followed: _Followed) -> bool:
        """False: something before it is missing."""
        if message.sequence <= followed.sequence:
            return True
        if message.sequence > followed.sequence + 1:
            return False
        followed.sequence = message.sequence
        self.index.change(message.worker.incarnation, _unpacked(message.stored), _unpacked(message.removed))
        return True

    def _ask(self, followed: _Followed) -> bool:
        if followed.asked:
            return False
        followed.asked = True
        return True

    def _of(self, life: Incarnation) -> _Followed:
        return self._followed.setdefault(life, _Followed())


def _unpacked(packed: bytes) -> Iterator[bytes]:
    return (packed[at : at + PREFIX_HASH_BYTES] for at in range(0, len(packed), PREFIX_HASH_BYTES))
