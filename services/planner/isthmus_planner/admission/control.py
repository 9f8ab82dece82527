"""Go now, wait in line, or come back later: decided from the best route's prediction. Pure: time is an argument.

A request without targets goes at once, whatever its route looks like. One with targets
* goes when a route is predicted to meet them, none of those already there misses its own, and nobody waits before it;
* is refused when no route meets its time to the first token: that only gets later by waiting;
* else waits, as long as it still could: until the time to the first token would be missed, at most `max_wait_s`.
  What wait is predicted to take longer than that is refused at once, with that wait as Retry-After.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from isthmus_planner.admission.line import Entry, Line
from isthmus_planner.routing.types import Choice
from isthmus_shared.errors import IsthmusError, SloUnattainable
from isthmus_shared.messages.route import RouteRequest

MAX_LINE = 4096
"""In all models' lines of one replica: some 2 MB, and 40 s of work at a hundred requests per second."""
GRACE_S = 2.0
"""Beyond an ask's patience its asker may be late by so much and keeps its place."""
LEAST_RETRY_S = 0.5
"""One heartbeat: nothing is known to be better any sooner."""
MOST_RETRY_S = 60.0
HELD_MARGIN = 1.4
"""What has waited goes only if so many times its predicted TTFT is left: it goes when load is highest, where
predictions are worst, and a miss then costs those behind it their turn as well."""
RATE_MEMORY = 0.9
"""Of the mean time between two that go, against the newest."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    max_wait_s: float = 30.0
    """In line, of a request whose time to the first token has no target."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of tenants; 1 for those that are not named."""


@dataclass(frozen=True, slots=True)
class Go:
    choice: Choice


@dataclass(frozen=True, slots=True)
class Wait:
    position: int
    wait_s: float
    """Predicted, from here."""


@dataclass(frozen=True, slots=True)
class Refuse:
    error: IsthmusError


Decision = Go | Wait | Refuse
Choose = Callable[[RouteRequest], Choice]
"""The best route as of now; raises the typed refusal where there is none at all."""


@dataclass(slots=True)
class _Waiting:
    request: RouteRequest
    asked_s: float
    """When this ask came: what it had waited by then is in the request."""
    away: bool = False
    """Its asker has been told that it is in line, and will ask again."""


class Admission:
    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._lines: dict[str, Line] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._interval_s: dict[str, float] = {}
        """By model: mean time between two that went from its line."""
        self._went_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Mapping[str, int]:
        """By model."""
        return {model: len(line) for model, line in self._lines.items()}

    def offer(self, request: RouteRequest, choose: Choose, now_s: float) -> Decision:
        """A new ask, or one that has waited here or elsewhere and asks again."""
        if not _has_targets(request):
            self.withdraw(request.request_id)
            return self._judge(request, choose, may_wait=False)
        line = self._lines.setdefault(request.model, Line(self._settings.weights))
        entry = line.get(request.request_id)
        if entry is not None:
            if now_s >= entry.until_s:
                self._leave(line, entry.key)
                wait_s = self._wait_s(request.model, len(line))
                self._drop_empty(request.model)
                return Refuse(_overdue(now_s - entry.since_s, wait_s))
            self._waiting[request.request_id] = _Waiting(request, now_s)
            return self._place(request, line)
        decision = self._judge(request, choose, may_wait=True)
        if isinstance(decision, Refuse) or (isinstance(decision, Go) and not self._waits_for_others(line, request)):
            self._drop_empty(request.model)
            return decision
        if len(self._waiting) >= MAX_LINE:
            self._drop_empty(request.model)
            return Refuse(_too_many(self._wait_s(request.model, len(line))))
        self._enter(line, request, now_s)
        return self._place(request, line)

    def release(self, choose: Choose, now_s: float) -> Iterator[tuple[RouteRequest, Decision]]:
        """Something may have become free: who goes now, and for whom waiting has become pointless.

        What is yielded as `Go` is in effect when the next one is chosen: the caller books it first.
        """
        for request_id in [key for key, waiting in self._waiting.items() if _lapsed(waiting, now_s)]:
            self.withdraw(request_id)
        for model, line in list(self._lines.items()):
            for entry in line.overdue(now_s):
                if self._waiting[entry.key].away:
                    continue  # it learns when it asks again
                request = self._leave(line, entry.key)
                yield request, Refuse(_overdue(now_s - entry.since_s, self._wait_s(model, len(line))))
            yield from self._from_line(model, line, choose, now_s)
            self._drop_empty(model)

    def away(self, request_id: str) -> Wait | None:
        """Its asker is told that it is still in line; its place is kept for `GRACE_S`. None: it is not there."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return None
        waiting.away = True
        return self._place(waiting.request, self._lines[waiting.request.model])

    def withdraw(self, request_id: str) -> None:
        """Its client has left, or it has another answer."""
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            line = self._lines[waiting.request.model]
            self._leave(line, request_id)
            self._drop_empty(waiting.request.model)

    def check_invariants(self) -> None:
        assert len(self._waiting) == sum(len(line) for line in self._lines.values()) <= MAX_LINE
        for line in self._lines.values():
            line.check_invariants()

    # -- one request ------------------------------------------------------------------------------------------------

    def _judge(self, request: RouteRequest, choose: Choose, *, may_wait: bool, waits: bool = False) -> Decision:
        """As if nobody else waited. `waits`: it is in line, and stays there until its time is over."""
        try:
            choice = choose(request)
        except IsthmusError as error:
            return Refuse(error)
        if waits and self._left_s(request) < HELD_MARGIN * choice.predicted.ttft_p50_s:
            return Refuse(_too_late(request, choice))
        if not may_wait or choice.feasible:
            return Go(choice)
        if not choice.meets_ttft:
            return Refuse(_too_late(request, choice))
        if not waits and choice.predicted_wait_s > self._slack_s(request, choice):
            return Refuse(_too_long(request, choice))
        return Wait(0, choice.predicted_wait_s)

    @staticmethod
    def _left_s(request: RouteRequest) -> float:
        """Of its time to the first token."""
        slo = request.slo
        return math.inf if slo is None or slo.ttft_s is None else slo.ttft_s - request.waited_s

    def _slack_s(self, request: RouteRequest, choice: Choice) -> float:
        """How long it may wait from now on."""
        slo, most_s = request.slo, self._settings.max_wait_s - request.waited_s
        if slo is None or slo.ttft_s is None:
            return most_s
        return min(most_s, slo.ttft_s - request.waited_s - choice.predicted.ttft_p50_s)

    def _waits_for_others(self, line: Line, request: RouteRequest) -> bool:
        assert request.slo is not None
        return line.waits_before(request.slo.priority)

    def _enter(self, line: Line, request: RouteRequest, now_s: float) -> None:
        slo = request.slo
        assert slo is not None
        since_s = now_s - request.waited_s
        longest_s = self._settings.max_wait_s if slo.ttft_s is None else min(self._settings.max_wait_s, slo.ttft_s)
        entry = Entry(
            key=request.request_id,
            tenant=request.tenant,
            priority=slo.priority,
            cost=float(request.isl_tokens),
            since_s=since_s,
            until_s=since_s + longest_s,
        )
        line.add(entry, moved=request.waited_s > 0)
        self._waiting[request.request_id] = _Waiting(request, now_s)

    def _place(self, request: RouteRequest, line: Line) -> Wait:
        entry = line.get(request.request_id)
        assert entry is not None
        position = line.position_of(entry)
        return Wait(position, self._wait_s(request.model, position))

    def _wait_s(self, model: str, position: int) -> float:
        return (position + 1) * self._interval_s.get(model, LEAST_RETRY_S)

    # -- the line ---------------------------------------------------------------------------------------------------

    def _from_line(
        self, model: str, line: Line, choose: Choose, now_s: float
    ) -> Iterator[tuple[RouteRequest, Decision]]:
        while True:
            for entry in line.next(now_s):
                waiting = self._waiting[entry.key]
                if waiting.away:
                    continue
                waited_s = waiting.request.waited_s + now_s - waiting.asked_s
                request = waiting.request.model_copy(update={"waited_s": waited_s})
                decision = self._judge(request, choose, may_wait=True, waits=True)
                if isinstance(decision, Go):
                    self._note_went(model, now_s)
                    line.went(entry.key, now_s)
                    del self._waiting[entry.key]
                    yield request, decision
                    break
                if isinstance(decision, Refuse):
                    self._leave(line, entry.key)
                    yield request, decision
                    break
            else:
                return

    def _drop_empty(self, model: str) -> None:
        if not self._lines[model]:
            del self._lines[model]

    def _leave(self, line: Line, key: str) -> RouteRequest:
        line.remove(key)
        return self._waiting.pop(key).request

    def _note_went(self, model: str, now_s: float) -> None:
        last_s = self._went_s.get(model)
        self._went_s[model] = now_s
        if last_s is not None:
            mean_s = self._interval_s.get(model, LEAST_RETRY_S)
            self._interval_s[model] = RATE_MEMORY * mean_s + (1 - RATE_MEMORY) * min(MOST_RETRY_S, now_s - last_s)


def _has_targets(request: RouteRequest) -> bool:
    slo = request.slo
    if request.staged is not None or request.exclude:  # it has begun already: what it was promised is late anyway
        return False
    return slo is not None and (slo.ttft_s is not None or slo.itl_s is not None)


def _lapsed(waiting: _Waiting, now_s: float) -> bool:
    return waiting.away and now_s > waiting.asked_s + waiting.request.patience_s + GRACE_S


def _retry_s(wait_s: float) -> float:
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, wait_s))


def _too_late(request: RouteRequest, choice: Choice) -> SloUnattainable:
    assert request.slo is not None
    return SloUnattainable(
        f"the first token would come after {request.waited_s + choice.predicted.ttft_p50_s:.2f} s",
        why=f"{_named(request)} allows {request.slo.ttft_s:g} s",
        todo="come back after the time in Retry-After, or ask with another class",
        retry_after_s=_retry_s(choice.predicted_wait_s or choice.ttft_over_s),
    )


def _too_long(request: RouteRequest, choice: Choice) -> SloUnattainable:
    return SloUnattainable(
        f"the workers have room for this request in {choice.predicted_wait_s:.1f} s",
        why=f"that is later than {_named(request)} allows",
        todo="come back after the time in Retry-After, or ask with another class",
        retry_after_s=_retry_s(choice.predicted_wait_s),
    )


def _overdue(waited_s: float, wait_s: float) -> SloUnattainable:
    return SloUnattainable(
        f"no worker had room within its targets for {waited_s:.1f} s",
        todo="come back after the time in Retry-After, or ask with another class",
        retry_after_s=_retry_s(wait_s),
    )


def _too_many(wait_s: float) -> SloUnattainable:
    return SloUnattainable(
        f"{MAX_LINE} requests wait already",
        todo="come back after the time in Retry-After",
        retry_after_s=_retry_s(wait_s),
    )


def _named(request: RouteRequest) -> str:
    assert request.slo is not None
    return f"its class {request.slo.name!r}" if request.slo.name else "its target"
