"""Who is alive, from heartbeats. Pure: time is an argument, what happened comes back as values.

* A process is lost after `LOST_AFTER_BEATS` of its own intervals without a beat, or when `WorkerLost` says so.
* A new incarnation under a known id replaces the old one at once: that one is lost.
* After `WorkerLost` the beats of that life are refused for `VERDICT_S`: they were sent before it died. A later beat
  proves that the verdict was wrong (its relay closed the socket, say), and the worker is back.
* One that was only silent (the bus was away) is back with its first beat.
* When this process was held up or cut off from the bus, everyone's silence is measured from where it went on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from isthmus_shared.ids import Incarnation, IngressId, NodeId, WorkerId
from isthmus_shared.messages.health import (
    LOST_AFTER_BEATS,
    IngressHeartbeat,
    PlannerHeartbeat,
    RelayHeartbeat,
    WorkerHeartbeat,
    WorkerLost,
)
from isthmus_shared.messages.work import WorkerRef

VERDICT_S = 5.0
"""A beat is on its way for milliseconds; five seconds outlast any that was queued before the death."""
HELD_UP_S = 1.0
"""Sweeps come several times a second; a longer gap means that this process did not run."""
MAX_VERDICTS = 1024
"""Lives remembered as lost; the oldest of so many is long past `VERDICT_S`."""
MAX_MODELS = 256
"""Model names remembered after their last worker went, so that its absence is a 503 and not a 404."""

_Beat = TypeVar("_Beat", WorkerHeartbeat, RelayHeartbeat, IngressHeartbeat, PlannerHeartbeat)
_Key = TypeVar("_Key", NodeId, IngressId, Incarnation)


@dataclass(slots=True)
class Member(Generic[_Beat]):
    """One life and its last beat."""

    beat: _Beat
    seen_s: float

    def silence_s(self, now_s: float) -> float:
        return now_s - self.seen_s

    def is_lost(self, now_s: float) -> bool:
        return self.silence_s(now_s) > LOST_AFTER_BEATS * self.beat.interval_s


def ref_of(beat: WorkerHeartbeat) -> WorkerRef:
    return WorkerRef(worker_id=beat.worker_id, incarnation=beat.incarnation, node_id=beat.node_id)


class Registry:
    """The soft state of one planner. A new one is whole again after one heartbeat interval."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, Member[WorkerHeartbeat]] = {}
        self._relays: dict[NodeId, Member[RelayHeartbeat]] = {}
        self._ingresses: dict[IngressId, Member[IngressHeartbeat]] = {}
        self._planners: dict[Incarnation, Member[PlannerHeartbeat]] = {}
        self._highest_epoch = 0
        self._verdicts: OrderedDict[Incarnation, float] = OrderedDict()
        self._models: OrderedDict[str, None] = OrderedDict()
        self._swept_s: float | None = None

    @property
    def workers(self) -> tuple[WorkerHeartbeat, ...]:
        """Live workers by id."""
        return tuple(self._workers[key].beat for key in sorted(self._workers))

    @property
    def relays(self) -> tuple[RelayHeartbeat, ...]:
        return tuple(self._relays[key].beat for key in sorted(self._relays))

    @property
    def ingresses(self) -> tuple[IngressHeartbeat, ...]:
        return tuple(self._ingresses[key].beat for key in sorted(self._ingresses))

    @property
    def planners(self) -> tuple[PlannerHeartbeat, ...]:
        return tuple(self._planners[key].beat for key in sorted(self._planners))

    @property
    def highest_epoch(self) -> int:
        """Of any leadership that a heartbeat has told of, its leader alive or not."""
        return self._highest_epoch

    def lives(self, beat: WorkerHeartbeat) -> bool:
        """Whether that very life of the worker is among the living."""
        known = self._workers.get(beat.worker_id)
        return known is not None and known.beat.incarnation == beat.incarnation

    def knows_model(self, model: str) -> bool:
        """Whether a worker with that model has ever been seen."""
        return model in self._models

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted(self._models))

    def worker_beat(self, beat: WorkerHeartbeat, now_s: float) -> tuple[WorkerLost, ...]:
        """Takes a beat in; returns the earlier life that it replaces, if there was one."""
        if self._is_refused(beat.incarnation, now_s):
            return ()
        known = self._workers.get(beat.worker_id)
        replaced: tuple[WorkerLost, ...] = ()
        if known is not None and known.beat.incarnation != beat.incarnation:
            self._pronounce(known.beat.incarnation, now_s)
            replaced = (WorkerLost(worker=ref_of(known.beat), why=f"{beat.worker_id} started anew"),)
        self._workers[beat.worker_id] = Member(beat, now_s)
        self._highest_epoch = max(self._highest_epoch, beat.epoch)
        if beat.model:
            self._models[beat.model] = None
            self._models.move_to_end(beat.model)
            while len(self._models) > MAX_MODELS:
                self._models.popitem(last=False)
        return replaced

    def relay_beat(self, beat: RelayHeartbeat, now_s: float) -> None:
        self._take(self._relays, beat.relay.node_id, beat, now_s)

    def ingress_beat(self, beat: IngressHeartbeat, now_s: float) -> None:
        self._take(self._ingresses, beat.ingress_id, beat, now_s)

    def planner_beat(self, beat: PlannerHeartbeat, now_s: float) -> None:
        self._highest_epoch = max(self._highest_epoch, beat.epoch)
        self._take(self._planners, beat.incarnation, beat, now_s)

    def worker_lost(self, worker: WorkerRef, now_s: float) -> bool:
        """Somebody saw that life end. Returns whether it was among the living."""
        known = self._workers.get(worker.worker_id)
        self._pronounce(worker.incarnation, now_s)
        if known is None or known.beat.incarnation != worker.incarnation:
            return False
        del self._workers[worker.worker_id]
        return True

    def sweep(self, now_s: float, *, deaf: bool = False) -> tuple[WorkerLost, ...]:
        """Drops who has been silent for too long; returns the workers among them. `deaf`: the bus is out of reach."""
        gap_s = 0.0 if self._swept_s is None else now_s - self._swept_s
        self._swept_s = now_s
        if deaf or gap_s > HELD_UP_S:
            self._excuse(gap_s)
        lost = tuple(
            WorkerLost(worker=ref_of(member.beat), why=f"no heartbeat for {member.silence_s(now_s):.1f} s", silent=True)
            for member in self._workers.values()
            if member.is_lost(now_s)
        )
        self._workers = {key: member for key, member in self._workers.items() if not member.is_lost(now_s)}
        self._relays = {key: member for key, member in self._relays.items() if not member.is_lost(now_s)}
        self._ingresses = {key: member for key, member in self._ingresses.items() if not member.is_lost(now_s)}
        self._planners = {key: member for key, member in self._planners.items() if not member.is_lost(now_s)}
        while self._verdicts and (now_s - next(iter(self._verdicts.values())) > VERDICT_S):
            self._verdicts.popitem(last=False)
        return lost

    def _excuse(self, gap_s: float) -> None:
        """For `gap_s` this process could hear nobody: that silence is not held against anyone."""
        members: Iterable[
            Member[WorkerHeartbeat] | Member[RelayHeartbeat] | Member[IngressHeartbeat] | Member[PlannerHeartbeat]
        ] = (
            *self._workers.values(),
            *self._relays.values(),
            *self._ingresses.values(),
            *self._planners.values(),
        )
        for member in members:
            member.seen_s += gap_s

    def check_invariants(self) -> None:
        assert all(member.beat.worker_id == key for key, member in self._workers.items())
        assert len(self._verdicts) <= MAX_VERDICTS
        assert len(self._models) <= MAX_MODELS

    def _take(self, members: dict[_Key, Member[_Beat]], key: _Key, beat: _Beat, now_s: float) -> None:
        if self._is_refused(beat.incarnation, now_s):
            return
        known = members.get(key)
        if known is not None and known.beat.incarnation != beat.incarnation:
            self._pronounce(known.beat.incarnation, now_s)
        members[key] = Member(beat, now_s)

    def _is_refused(self, incarnation: Incarnation, now_s: float) -> bool:
        at_s = self._verdicts.get(incarnation)
        return at_s is not None and now_s - at_s <= VERDICT_S

    def _pronounce(self, incarnation: Incarnation, now_s: float) -> None:
        self._verdicts[incarnation] = now_s
        self._verdicts.move_to_end(incarnation)
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
