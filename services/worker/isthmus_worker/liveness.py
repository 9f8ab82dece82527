"""Which ingresses are alive, from their heartbeats: what is held for a dead one is nobody's. Pure."""

from __future__ import annotations

from collections.abc import Iterable

INGRESS_LOST_S = 5.0
"""Silence after which an ingress' requests are aborted. Ten of its beats: too late costs a few seconds of tokens that
nobody reads, too early ends streams that somebody does."""
HELD_UP_S = 1.0
"""Sweeps come twice a second; a longer gap means that this process did not run and could hear nobody."""


class IngressLife:
    def __init__(self, lost_s: float = INGRESS_LOST_S) -> None:
        self._lost_s = lost_s
        self._heard_s: dict[str, float] = {}
        self._swept_s: float | None = None

    def beat(self, events_subject: str, now_s: float) -> None:
        self._heard_s[events_subject] = now_s

    def expect(self, events_subject: str, now_s: float) -> None:
        """A request came from there: that is a sign of life too, and the first one of a new ingress."""
        self._heard_s[events_subject] = now_s

    def sweep(self, now_s: float, holding: Iterable[str], *, deaf: bool) -> frozenset[str]:
        """Subjects among `holding` whose ingress is gone. `deaf`: the bus is away, so silence means nothing."""
        gap_s = 0.0 if self._swept_s is None else now_s - self._swept_s
        self._swept_s = now_s
        wanted = set(holding)
        self._heard_s = {subject: at_s for subject, at_s in self._heard_s.items() if subject in wanted}
        if deaf or gap_s > HELD_UP_S:
            self._heard_s = {subject: at_s + gap_s for subject, at_s in self._heard_s.items()}
        return frozenset(s for s in wanted if now_s - self._heard_s.setdefault(s, now_s) > self._lost_s)
