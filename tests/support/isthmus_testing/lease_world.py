"""Would-be leaders with clocks of their own, a bucket, and a network that delays and loses: one seeded run.

True time is the simulation's; a planner's clock runs at its own rate. What must hold: at no moment do two planners
hold an epoch; epochs only grow; a dead leader is followed by another in time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from isthmus_planner.leader.lease import Lease, LeaseTimes, Question, Read, Record, Write
from isthmus_shared.ids import Incarnation

FOLLOWED_S = 3.0
"""From the end of a leader until another acts, where the bucket answers promptly."""
ROUGH_FOLLOWED_S = 15.0
"""Where a fourth of the messages take up to 1.5 s and one in fifty is lost: some tries in a row may fail."""
WIPED_APART_S = 6.0
"""A bus that loses its state twice within a lease could make two leaders; their epochs still keep them apart."""
START_S = 1.0
"""By then all have begun."""


@dataclass
class Candidate:
    number: int
    rate: float
    """Seconds of its clock per true second."""
    offset_s: float
    lease: Lease
    alive: bool = True
    stalled_until_s: float = 0.0
    """A pause of the process: it neither asks nor takes answers, but what it has sent goes on."""
    cut_until_s: float = 0.0
    """No message from or to it arrives."""
    asked: int = 0
    acted: list[tuple[float, int]] = field(default_factory=list)

    def clock_s(self, now_s: float) -> float:
        return self.offset_s + self.rate * now_s

    def true_s(self, clock_s: float) -> float:
        return (clock_s - self.offset_s) / self.rate


class LeaseWorld:
    """`run` gives the problems found; none is the point."""

    def __init__(
        self, seed: int, *, candidates: int = 3, over_s: float = 40.0, faults: bool = True, rough: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.times = LeaseTimes()
        self.over_s, self.faults, self.rough = over_s, faults, rough
        self.followed_s = ROUGH_FOLLOWED_S if rough else FOLLOWED_S
        self.now_s = 0.0
        self.record = Record()
        self._revision = 0
        self._wiped_s = 0.0
        self.lost_until_s = 0.0
        self.problems: list[str] = []
        self.epochs: list[int] = []
        self.lives = itertools.count()
        self.planners = [self._candidate() for _ in range(candidates)]
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._leaderless_since_s = 0.0
        self._disturbed_s = START_S

    def _candidate(self) -> Candidate:
        number = next(self.lives)
        half = 0.5 * self.times.margin_s / self.times.lease_s
        rate = self.rng.uniform(1 - half, 1 + half) if self.faults else 1.0
        lease = Lease(Incarnation(f"life-{number}"), self.times)
        return Candidate(number, rate, self.rng.uniform(0, 100), lease)

    def run(self) -> list[str]:
        for planner in self.planners:
            self._at(self.rng.uniform(0, START_S), lambda planner=planner: self._turn(planner))
        if self.faults:
            for _ in range(self.rng.randint(1, 8)):
                self._at(self.rng.uniform(3, self.over_s - 8), self._fault)
        while self._due and not self.problems:
            at_s, _, action = heapq.heappop(self._due)
            if at_s > self.over_s:
                break
            self._look_until(at_s)
            self.now_s = at_s
            action()
            self._look()
        return self.problems

    # -- the rules

    def _leading(self, at_s: float) -> list[tuple[Candidate, int]]:
        found = []
        for planner in self.planners:
            epoch = planner.lease.epoch(now_s=planner.clock_s(at_s))
            if planner.alive and epoch is not None:
                found.append((planner, epoch))
        return found

    def _leader(self) -> Candidate | None:
        leading = self._leading(self.now_s)
        return leading[0][0] if leading else None

    def _look_until(self, at_s: float) -> None:
        """Nothing but time changes until then, and time only ends leaderships: notice when the last one did."""
        before = self._leading(self.now_s)
        if before and not self._leading(at_s):
            self._leaderless_since_s = at_s

    def _look(self) -> None:
        leading = self._leading(self.now_s)
        for planner in self.planners:
            planner.lease.check_invariants()
        if len(leading) > 1:
            who = ", ".join(f"{planner.number} with epoch {epoch}" for planner, epoch in leading)
            self.problems.append(f"at {self.now_s:.3f} s two lead: {who}")
        for _, epoch in leading:
            if not self.epochs or epoch != self.epochs[-1]:
                if self.epochs and epoch < self.epochs[-1]:
                    self.problems.append(f"at {self.now_s:.3f} s epoch {epoch} after {self.epochs[-1]}")
                self.epochs.append(epoch)
        if leading:
            self._leaderless_since_s = self.now_s
            return
        since_s = max(self._leaderless_since_s, self._disturbed_s)
        if self.now_s - since_s > self.followed_s:
            self.problems.append(f"at {self.now_s:.3f} s nobody has led for {self.now_s - since_s:.2f} s")

    # -- a planner asks, the bucket answers

    def _turn(self, planner: Candidate) -> None:
        if not planner.alive:
            return
        if planner.stalled_until_s > self.now_s:
            self._at(planner.stalled_until_s, lambda: self._turn(planner))
            return
        floor = max(self.epochs, default=0)
        question = planner.lease.ask(now_s=planner.clock_s(self.now_s), floor=floor)
        planner.asked += 1
        asked = planner.asked
        timeout_s = self.times.answer_s / planner.rate
        self._at(self.now_s + timeout_s, lambda: self._answered(planner, asked, None, question))
        self._send(planner, question, asked)

    def _send(self, planner: Candidate, question: Question, asked: int) -> None:
        if self._lost(planner):
            return
        late_s = self.rng.choice((0.002, 0.002, 0.02, 0.4, 1.5)) if self.rough else 0.002
        self._at(self.now_s + self.rng.uniform(0, late_s), lambda: self._serve(planner, question, asked))

    def _serve(self, planner: Candidate, question: Question, asked: int) -> None:
        answer: Record | int | bool
        if isinstance(question, Read):
            answer = self.record
        elif question.over != self.record.revision:
            answer = False
        else:
            wrote = question.record
            revision = self._revision = self._revision + 1
            self.record = Record(revision, wrote.holder, wrote.epoch, wrote.write, wrote.released)
            answer = revision
        if self._lost(planner):
            return
        delay_s = self.rng.uniform(0, 0.3 if self.rough and self.rng.random() < 0.1 else 0.002)
        self._at(self.now_s + delay_s, lambda: self._answered(planner, asked, answer, question))

    def _lost(self, planner: Candidate) -> bool:
        if self.now_s < max(self.lost_until_s, planner.cut_until_s):
            return True
        return self.rough and self.rng.random() < 0.02

    def _answered(self, planner: Candidate, asked: int, answer: Record | int | bool | None, question: Question) -> None:
        if not planner.alive or asked != planner.asked:
            return
        if planner.stalled_until_s > self.now_s:
            self._at(planner.stalled_until_s, lambda: self._answered(planner, asked, answer, question))
            return
        planner.asked += 1  # whatever else comes for that question is too late
        now_s = planner.clock_s(self.now_s)
        match answer:
            case None:
                planner.lease.unknown(now_s=now_s)
            case Record():
                planner.lease.found(answer, now_s=now_s)
            case False:
                planner.lease.refused(now_s=now_s)
            case _:
                planner.lease.written(int(answer), now_s=now_s)
        self._at(max(self.now_s, planner.true_s(planner.lease.next_s)), lambda: self._turn(planner))

    # -- faults

    def _fault(self) -> None:
        lasts_s = self.rng.uniform(0.1, 5)
        leader = self._leader()
        planner = leader if leader is not None and self.rng.random() < 0.7 else self.rng.choice(self.planners)
        match self.rng.randrange(6):
            case 0:
                planner.alive = False
                self.planners.remove(planner)
                self.planners.append(self._candidate())
                self._turn(self.planners[-1])
            case 1:
                planner.stalled_until_s = self.now_s + lasts_s
            case 2:
                planner.cut_until_s = self.now_s + lasts_s
            case 3:
                self.lost_until_s = self.now_s + lasts_s
            case 4 if self.now_s - self._wiped_s > WIPED_APART_S:
                self.record, self._wiped_s = Record(), self.now_s
                self._revision += 1_000_000  # a bucket that is made anew begins at the wall clock's milliseconds
            case 4:
                self.lost_until_s = self.now_s + lasts_s
            case _:
                released = planner.lease.release()
                if released is not None:
                    self._serve(planner, released, -1)
                planner.alive = False
                self.planners.remove(planner)
                self.planners.append(self._candidate())
                self._turn(self.planners[-1])
        stall_s = lasts_s if planner.stalled_until_s > self.now_s or planner.cut_until_s > self.now_s else 0.0
        ends_s = max(self.now_s + stall_s, self.lost_until_s)
        self._disturbed_s = max(self._disturbed_s, ends_s)

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), action))


def write_of(question: Question) -> Write:
    assert isinstance(question, Write)
    return question
