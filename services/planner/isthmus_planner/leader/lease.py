"""A lease on leadership, held in one record that changes only by compare-and-set. Pure: time is an argument.

Every planner runs one `Lease` on its own clock. The record's revision grows with each write.

* The holder writes the record anew every `renew_s`. It leads until `lease_s` less `margin_s` after it *sent* the last
  write that was confirmed.
* Another may write only over a record that it has seen unchanged for `lease_s` (or that was released), and only if it
  is still unchanged. A record was seen no earlier than it was written, and that no earlier than it was sent; so the
  old holder has stopped before the new one begins, as long as no clock gains more than `margin_s` on another within
  `lease_s`.
* A bucket that is empty (a bus that lost its state) counts as a record too: a holder may still believe in the old one.
* A write whose outcome is unknown is looked up: the record names its writer and which of its writes it was.
* An epoch is one more than any that was seen, in the record or anywhere else (`floor`), so it grows even where the
  record is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_shared.ids import Incarnation


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds. With these a death is followed by a new leader within lease_s + renew_s + poll_s = 2.75 s."""

    lease_s: float = 2.0
    renew_s: float = 0.5
    """Three renewals may be lost before the lease is."""
    poll_s: float = 0.25
    """Between two looks of one that does not lead."""
    margin_s: float = 0.3
    """What clocks may gain on each other within `lease_s`: 15 %, a thousand times a quartz' error."""
    answer_s: float = 0.75
    """Longest that one question of the bucket is waited for."""


@dataclass(frozen=True, slots=True)
class Record:
    """What the bucket holds. `revision` 0: nothing."""

    revision: int = 0
    holder: str = ""
    epoch: int = 0
    write: int = 0
    """Of its holder's writes, which."""
    released: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """Ask for the record."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write `record` (its revision is still unknown) if the bucket's is `over`."""

    over: int
    record: Record


Question = Read | Write


class Lease:
    """One question at a time: `ask` begins it; `found`, `written`, `refused` or `unknown` ends it."""

    def __init__(self, me: Incarnation, times: LeaseTimes | None = None) -> None:
        self._me = me
        self._times = times or LeaseTimes()
        self._epoch: int | None = None
        self._leads_until_s = 0.0
        self._seen: Record | None = None
        self._seen_since_s = 0.0
        self._asked: Question | None = None
        self._asked_s = 0.0
        self._next_s = 0.0
        self._unsure = False
        self._writes = 0
        self._sent_s: dict[int, float] = {}
        """Of writes whose outcome is not known."""

    def epoch(self, *, now_s: float) -> int | None:
        """That of this planner's leadership now; None: it does not lead."""
        return self._epoch if now_s < self._leads_until_s else None

    @property
    def next_s(self) -> float:
        """When `ask` is due."""
        return self._next_s

    def ask(self, *, now_s: float, floor: int = 0) -> Question:
        """The next question. `floor`: the highest epoch heard of anywhere."""
        assert self._asked is None, "one question at a time"
        question: Question = Read()
        seen = self._seen
        if seen is not None and not self._unsure:
            if self._holds(seen) and self.epoch(now_s=now_s) is not None:
                question = self._write(seen, seen.epoch)
            elif seen.released or now_s - self._seen_since_s >= self._times.lease_s:
                question = self._write(seen, max(seen.epoch, floor) + 1)
        if isinstance(question, Write):
            self._sent_s[question.record.write] = now_s
        self._asked, self._asked_s = question, now_s
        return question

    def release(self) -> Write | None:
        """Ends this leadership at once, and tells the others, if it still has it."""
        seen, self._epoch = self._seen, None
        if seen is None or not self._holds(seen):
            return None
        self._writes += 1
        return Write(seen.revision, Record(0, self._me, seen.epoch, self._writes, released=True))

    def found(self, record: Record, *, now_s: float) -> None:
        """The answer to `Read`."""
        self._end(now_s)
        self._unsure = False
        self._see(record, now_s)
        if not self._holds(record):
            return
        sent_s = self._sent_s.get(record.write)
        if sent_s is not None:
            self._lead(record.epoch, sent_s)
        self._sent_s = {write: at_s for write, at_s in self._sent_s.items() if write > record.write}

    def written(self, revision: int, *, now_s: float) -> None:
        """The answer to `Write`: done, with that revision."""
        question, sent_s = self._asked, self._asked_s
        assert isinstance(question, Write)
        self._end(now_s)
        wrote = question.record
        self._see(Record(revision, wrote.holder, wrote.epoch, wrote.write), now_s)
        self._lead(wrote.epoch, sent_s)
        self._sent_s.clear()

    def refused(self, *, now_s: float) -> None:
        """The answer to `Write`: somebody else has written meanwhile, or an earlier write of ours came through late."""
        self._end(now_s)
        self._unsure, self._next_s = True, now_s

    def unknown(self, *, now_s: float) -> None:
        """No answer: a write may or may not have been done."""
        if isinstance(self._asked, Write):
            self._unsure = True
        self._end(now_s)
        self._next_s = now_s + self._times.poll_s

    def check_invariants(self) -> None:
        assert self._epoch is None or self._epoch > 0
        assert len(self._sent_s) <= MAX_UNKNOWN

    def _holds(self, record: Record) -> bool:
        return record.holder == self._me and not record.released

    def _write(self, over: Record, epoch: int) -> Write:
        self._writes += 1
        while len(self._sent_s) >= MAX_UNKNOWN:
            del self._sent_s[min(self._sent_s)]
        return Write(over.revision, Record(0, self._me, epoch, self._writes))

    def _see(self, record: Record, now_s: float) -> None:
        if record != self._seen:
            self._seen_since_s = now_s
        self._seen = record
        if not self._holds(record):
            self._epoch = None

    def _lead(self, epoch: int, sent_s: float) -> None:
        until_s = sent_s + self._times.lease_s - self._times.margin_s
        self._leads_until_s = max(self._leads_until_s, until_s) if epoch == self._epoch else until_s
        self._epoch = epoch

    def _end(self, now_s: float) -> None:
        assert self._asked is not None, "nothing was asked"
        self._asked = None
        leads = self.epoch(now_s=now_s) is not None
        self._next_s = now_s + (self._times.renew_s if leads else self._times.poll_s)


MAX_UNKNOWN = 64
"""Writes without an answer that are remembered: those of half a minute."""
