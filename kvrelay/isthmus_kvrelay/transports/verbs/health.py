"""Which rails to a peer are worth trying now. Pure: time is an argument."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from isthmus_shared.ids import Incarnation

FIRST_QUARANTINE_S = 1.0
"""Longer than the hardware's own retries (0.5 s), so that a path that is gone costs at most half of the time."""
LONGEST_QUARANTINE_S = 60.0
"""A mended cable is found within a minute."""
MAX_KNOWN = 1_024
"""Pairs of device and peer remembered; beyond it the one that failed longest ago goes."""


@dataclass(slots=True)
class _Record:
    failures: int
    until_s: float


class RailHealth:
    """Each (device, life of a peer) alone: a peer that died says nothing about the device towards others."""

    def __init__(self, *, first_s: float = FIRST_QUARANTINE_S, longest_s: float = LONGEST_QUARANTINE_S) -> None:
        assert 0 < first_s <= longest_s
        self._first_s, self._longest_s = first_s, longest_s
        self._records: OrderedDict[tuple[str, Incarnation], _Record] = OrderedDict()

    def failed(self, device: str, peer: Incarnation, *, now_s: float) -> float:
        """Put it into quarantine, each time twice as long as the last; returns for how long, in seconds."""
        record = self._records.pop((device, peer), None) or _Record(0, now_s)
        length_s = min(self._first_s * float(1 << min(record.failures, 32)), self._longest_s)
        record.failures += 1
        record.until_s = now_s + length_s
        self._records[device, peer] = record
        if len(self._records) > MAX_KNOWN:
            self._records.popitem(last=False)
        return length_s

    def worked(self, device: str, peer: Incarnation) -> None:
        """Bytes have crossed: the next failure counts as a first one."""
        self._records.pop((device, peer), None)

    def left_s(self, device: str, peer: Incarnation, *, now_s: float) -> float:
        """Seconds of quarantine that are left; 0: try it."""
        record = self._records.get((device, peer))
        return max(0.0, record.until_s - now_s) if record is not None else 0.0

    def __len__(self) -> int:
        return len(self._records)
