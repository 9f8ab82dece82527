"""What decides: estimates, seats, admission, accuracy and drift, joined. Pure: the service gives it messages and time,
and so does the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from isthmus_planner.admission.control import Admission, AdmissionSettings, Decision, Go
from isthmus_planner.cost.speeds import prior_costs
from isthmus_planner.drift import SETTLED_STEPS, Drift
from isthmus_planner.estimates import Estimates
from isthmus_planner.outcomes import Accuracy
from isthmus_planner.routing.policy import Policy
from isthmus_planner.routing.seat import Correction
from isthmus_planner.routing.types import Choice
from isthmus_planner.routing.view import View
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.health import WorkerHeartbeat
from isthmus_shared.messages.outcomes import Outcome
from isthmus_shared.messages.route import RouteRequest

QUEUED_SHARE = 0.25
"""Of a predicted time to the first token: with more of it in the queue the outcome tells of the queue."""


class Desk:
    def __init__(
        self,
        policy: Policy,
        settings: AdmissionSettings,
        choose: Callable[[RouteRequest, View, float], Choice],
    ) -> None:
        """`choose`: the best route out of the view now; raises the typed refusal where there is none."""
        self.seats = View(policy)
        self.estimates = Estimates(prior_costs(policy.constants))
        self.admission = Admission(settings)
        self.accuracy = Accuracy()
        self.drift = Drift()
        self._choose = choose

    # -- what comes in ----------------------------------------------------------------------------------------------

    def beat(self, beat: WorkerHeartbeat, now_s: float) -> bool:
        """True: the worker has begun to drift, or does so no longer (`drift`)."""
        life = beat.incarnation
        steps = self.estimates.beat(beat)
        live = self.estimates.live().get(life)
        self.seats.beat(beat, now_s, live)
        return live is not None and self.drift.beat(life, live, steps)

    def outcome(self, outcome: Outcome, now_s: float) -> None:
        self.seats.outcome(outcome, now_s)
        self.accuracy.take(outcome)
        for worker in (outcome.prefill, outcome.decode):
            if worker is not None:
                self._correct(worker.incarnation)

    def lost(self, life: Incarnation) -> None:
        self.seats.lost(life)

    def keep(self, alive: Iterable[Incarnation]) -> None:
        living = tuple(alive)
        self.estimates.keep(living)
        self.accuracy.keep(living)
        self.drift.keep(living)

    # -- what is asked ----------------------------------------------------------------------------------------------

    def choose(self, request: RouteRequest, now_s: float) -> Choice:
        return self._choose(request, self.seats, now_s)

    def offer(self, request: RouteRequest, now_s: float) -> Decision:
        """What is to go is booked."""
        return self._booked(self.admission.offer(request, lambda asked: self.choose(asked, now_s), now_s), now_s)

    def release(self, now_s: float) -> Iterator[tuple[RouteRequest, Decision]]:
        """Of those in line: who goes now (booked), and who is refused."""
        for request, decision in self.admission.release(lambda asked: self.choose(asked, now_s), now_s):
            yield request, self._booked(decision, now_s)

    def commit(self, choice: Choice, now_s: float) -> None:
        """It will be carried out."""
        self.seats.commit(choice, now_s)
        first = choice.decode if choice.prefill is None else choice.prefill
        live = self.estimates.live().get(choice.decode.life)
        self.accuracy.made(
            choice.request.request_id,
            first.life,
            choice.decode.life,
            tells_base=first.wait_s(now_s) <= QUEUED_SHARE * choice.predicted.ttft_p50_s,
            tells_factor=live is not None and live.decode_seen >= SETTLED_STEPS,
        )

    # -- inside -----------------------------------------------------------------------------------------------------

    def _booked(self, decision: Decision, now_s: float) -> Decision:
        if isinstance(decision, Go):
            self.commit(decision.choice, now_s)
        return decision

    def _correct(self, life: Incarnation) -> None:
        base_s, factor = self.accuracy.correction(life)
        self.seats.correct(life, Correction(ttft_base_s=base_s, itl=factor))
