"""The planner itself as a policy: the service's own desk and registry, fed by heartbeats and outcomes as they go over
the bus, and by nothing else. Also a simple rule behind the same admission."""

from __future__ import annotations

from isthmus_planner.admission.control import AdmissionSettings, Decision, Go, Wait
from isthmus_planner.desk import Desk
from isthmus_planner.evaluate.ports import Ask, Held, Placed, Refused, Verdict
from isthmus_planner.evaluate.rules import Rule
from isthmus_planner.registry import Registry
from isthmus_planner.routing.choose import asked, choose
from isthmus_planner.routing.policy import ModePolicy, Policy
from isthmus_planner.routing.predicting import Picked, choice_of
from isthmus_planner.routing.refusing import Known
from isthmus_planner.routing.types import Choice
from isthmus_planner.routing.view import View
from isthmus_shared.ids import Incarnation, RequestId
from isthmus_shared.messages.health import RelayHeartbeat, WorkerHeartbeat
from isthmus_shared.messages.outcomes import Outcome
from isthmus_shared.messages.route import RouteRequest

PLANNER = Incarnation("inc-planner")
MODEL = "simulated"
AUTO = Policy(mode=ModePolicy.AUTO)


class Planner:
    """`admits`: whether it may refuse and hold; else every request goes at once."""

    def __init__(self, policy: Policy = AUTO, *, admits: bool = True, name: str = "planner") -> None:
        self.name, self._admits = name, admits
        self.registry = Registry()
        self.desk = Desk(policy, AdmissionSettings(), self._choose)
        self._asks: dict[str, Ask] = {}
        self._lives: dict[int, Incarnation] = {}
        self._index: dict[Incarnation, int] = {}
        self._now_s = 0.0

    def ask(self, ask: Ask, now_s: float) -> Verdict:
        request = RouteRequest(
            request_id=RequestId(f"req-{ask.number}"),
            model=MODEL,
            isl_tokens=ask.isl_tokens,
            max_osl_tokens=ask.max_osl_tokens,
            slo=ask.slo,
            tenant=ask.tenant,
        )
        self._now_s = now_s
        if not self._admits:
            choice = self.desk.choose(request, now_s)
            self.desk.commit(choice, now_s)
            return self._placed(ask, choice)
        decision = self.desk.offer(request, now_s)
        if isinstance(decision, Wait):
            self._asks[request.request_id] = ask
        return self._verdict(ask, decision)

    def poll(self, now_s: float) -> list[tuple[Ask, Verdict]]:
        self._now_s = now_s
        verdicts = []
        for request, decision in self.desk.release(now_s) if self._asks else ():
            ask = self._asks.pop(request.request_id)
            verdicts.append((ask, self._verdict(ask, decision)))
        return verdicts

    def beat(self, index: int, beat: WorkerHeartbeat, now_s: float) -> None:
        self._now_s = now_s
        self._index[beat.incarnation], self._lives[index] = index, beat.incarnation
        self.registry.worker_beat(beat, now_s)
        self.desk.beat(beat, now_s)

    def relay_beat(self, beat: RelayHeartbeat, now_s: float) -> None:
        self.registry.relay_beat(beat, now_s)
        self.desk.seats.relay(beat, now_s)

    def prefilled(self, index: int, isl_tokens: int) -> None:
        """It hears of that with the next beat."""

    def ended(self, index: int | None, decode: int, outcome: Outcome) -> None:
        self.desk.outcome(outcome, self._now_s)

    def _choose(self, request: RouteRequest, seats: View, now_s: float) -> Choice:
        return choose(request, seats, self._known, PLANNER, now_s)

    def _known(self) -> Known:
        return Known(models=frozenset(self.registry.models), warm=True)

    def _verdict(self, ask: Ask, decision: Decision) -> Verdict:
        match decision:
            case Go():
                return self._placed(ask, decision.choice)
            case Wait():
                return Held()
        return Refused(decision.error.retry_after_s or 1.0, decision.error.text)

    def _placed(self, ask: Ask, choice: Choice) -> Placed:
        prefill = None if choice.prefill is None else self._index[choice.prefill.life]
        return Placed(prefill, self._index[choice.decode.life], choice.predicted)


class GuardedRule(Planner):
    """A simple rule with the planner's rights and means to refuse and to hold."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(name=f"{rule.name} + 429")
        self._rule = rule

    def _choose(self, request: RouteRequest, seats: View, now_s: float) -> Choice:
        """The prediction of where the rule would place it now."""
        placed = self._rule.would_place(request.isl_tokens)
        decode = seats.seat(self._lives[placed.decode])
        assert decode is not None
        ask = asked(request, seats, now_s=now_s)
        if placed.prefill is None:
            return choice_of(request, Picked(ask, 0.0, None, decode), seats.policy, PLANNER)
        prefill = seats.seat(self._lives[placed.prefill])
        assert prefill is not None
        crossing = seats.crossing(prefill, decode, request.isl_tokens, now_s)
        return choice_of(request, Picked(ask, 0.0, prefill, decode, crossing), seats.policy, PLANNER)

    def prefilled(self, index: int, isl_tokens: int) -> None:
        self._rule.prefilled(index, isl_tokens)

    def ended(self, index: int | None, decode: int, outcome: Outcome) -> None:
        super().ended(index, decode, outcome)
        self._rule.ended(index, decode, outcome)

    def _placed(self, ask: Ask, choice: Choice) -> Placed:
        placed = super()._placed(ask, choice)
        self._rule.book(ask.isl_tokens, placed)
        return placed
