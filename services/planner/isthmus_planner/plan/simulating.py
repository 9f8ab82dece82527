"""A plan's finalists as the simulator's scenarios, and what it says of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from isthmus_planner.cost import kv, memory
from isthmus_planner.cost.laws import decode_law, prefill_law
from isthmus_planner.cost.layout import Layout, Precision
from isthmus_planner.cost.profiles import ModelProfile
from isthmus_planner.plan.capacity import Offer, Offers, Targets
from isthmus_planner.plan.inputs import RelaySpec
from isthmus_planner.plan.mix import Kind, Mix
from isthmus_planner.plan.search import Assignment
from isthmus_planner.sim.from_cost import decode_table, prefill_table
from isthmus_planner.sim.hardware import Interleave, Node, Relay, Role
from isthmus_planner.sim.result import Result, StreamResult
from isthmus_planner.sim.scenario import Scenario
from isthmus_planner.sim.simulate import simulate
from isthmus_planner.sim.workload import ClosedLoop, Poisson, PrefixHits, Stream

MAX_REPLICAS = 512
"""Above, a simulation takes longer than a plan may; the closed forms stand alone then, and the plan says so."""
LIFETIMES = 3.0
"""Of the kind with the longest answers: for so long requests are sent, so that what is under way has settled."""
LIFETIMES_SATURATED = 12.0
"""The same in a closed loop, whose clients start as one wave: a part of a wave more or less must not show."""
MIN_REQUESTS = 800
MIN_PER_KIND = 50
MAX_REQUESTS = 200_000
"""A second or two; a cluster that needs more is not simulated to its steady state, and the plan says so."""
WARMUP_SHARE = 0.25
LEAST_INTERFERENCE = -0.95
"""Of prefill beside decode, in the simulator's terms: 0 stops decode for as long as the prompt takes."""
MAX_TRIES = 4
"""Loads tried until the simulator finds the targets met; each next one is lower by as much as the last one missed."""
STEP_DOWN = (0.5, 0.96)
"""Bounds of one such step."""
TOLERANCE = 0.02
"""Of a target; the closed forms are this close to the simulator."""
SATURATION = 1.08
"""Clients of a closed loop over those that Little's law asks for: full load without a pointless queue."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """Of the operating point that the plan recommends."""

    load: float
    """Of what the closed forms allow."""
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    itl_s: float
    """Mean time between tokens of the median request."""
    itl_p90_s: float
    e2el_p50_s: float
    within_targets: bool
    bottleneck: str
    requests: int
    steady: bool
    """Whether enough requests were simulated for the figures to have settled."""


@dataclass(frozen=True, slots=True)
class _Load:
    share: float
    """Of what the closed forms allow."""
    requests_per_s: float
    clients: float

    def scaled(self, share: float) -> _Load:
        return _Load(share, self.requests_per_s / self.share * share, self.clients / self.share * share)


@dataclass(frozen=True, slots=True)
class Bench:
    """What every simulation of a plan shares."""

    model: ModelProfile
    mix: Mix
    targets: Targets
    relay: RelaySpec
    kv_precision: Precision
    seed: int

    def check(self, offers: tuple[Offers, ...], assignment: Assignment) -> Simulated | None:
        """At the highest load that meets the targets; None where there are too many replicas to simulate."""
        if _replicas(offers, assignment) > MAX_REPLICAS:
            return None
        nodes = self.nodes(offers, assignment)
        stay_s = self._longest_s(offers, assignment)
        full = _Load(1.0, assignment.requests_per_s, self._clients(offers, assignment))
        load = full
        lifetimes = LIFETIMES_SATURATED if self.targets.ttft_s is None else LIFETIMES
        for _ in range(MAX_TRIES):
            found = self._run(nodes, load, lifetimes * load.requests_per_s * stay_s)
            if found.within_targets:
                break
            load = full.scaled(load.share * min(STEP_DOWN[1], max(STEP_DOWN[0], self._margin(found))))
        return found

    def _margin(self, found: Simulated) -> float:
        """The worse of the targets over what was found."""
        pairs = ((self.targets.ttft_s, found.ttft_p50_s), (self.targets.itl_s, found.itl_s))
        return min((target / value for target, value in pairs if target is not None and value > 0), default=1.0)

    def _longest_s(self, offers: tuple[Offers, ...], assignment: Assignment) -> float:
        """How long a request of the kind with the longest answers stays."""
        osl = max(kind.osl.mean for kind in self.mix.kinds)
        return max(
            offer.ttft_s + osl * offer.itl_s
            for each, counts in zip(offers, assignment.counts, strict=True)
            for role, offer in each.by_role.items()
            if counts[role] > 0
        )

    def nodes(self, offers: tuple[Offers, ...], assignment: Assignment) -> tuple[Node, ...]:
        """One for each replica."""
        made: list[Node] = []
        for offer, counts in zip(offers, assignment.counts, strict=True):
            for role in Role:
                chosen = offer.by_role.get(role)
                if chosen is None:
                    continue
                for server in range(round(counts[role])):
                    made += [self._node(offer, chosen, server, replica) for replica in range(chosen.replicas)]
        return tuple(made)

    def _node(self, offers: Offers, offer: Offer, server: int, replica: int) -> Node:
        kind = offers.node
        layout = Layout(tp=offer.tp, kv=self.kv_precision)
        fit = memory.fit(kind.accelerator, self.model, layout)
        decodes, prefills = offer.role is not Role.PREFILL, offer.role is not Role.DECODE
        link = math.inf if kind.nic_bytes_per_s is None else kind.nic_bytes_per_s / offer.replicas
        mean_prompt = kv.prompt_bytes(self.model, layout, self.mix.isl_tokens)
        return Node(
            name=f"{kind.name}/{offer.role.value}/{server}/{replica}",
            role=offer.role,
            kv_capacity_tokens=int(fit.kv_tokens),
            prefill=prefill_table(prefill_law(kind.accelerator, self.model, layout, offer.constants))
            if prefills
            else None,
            decode=decode_table(decode_law(kind.accelerator, self.model, layout, offer.constants), offer.max_batch)
            if decodes
            else None,
            interleave=Interleave.PREFILL_FIRST,
            interference=max(LEAST_INTERFERENCE, offer.constants.interference - 1.0),
            kv_bytes_per_token=mean_prompt / self.mix.isl_tokens,
            link_bytes_per_s=link,
        )

    def _clients(self, offers: tuple[Offers, ...], assignment: Assignment) -> float:
        """Under way at once, by Little's law over each server's own rate."""
        total = 0.0
        shares = {
            Role.PREFILL: _busy(offers, assignment, Role.PREFILL),
            Role.DECODE: _busy(offers, assignment, Role.DECODE),
            Role.AGGREGATED: 1.0,
        }
        for offer, counts in zip(offers, assignment.counts, strict=True):
            for role, chosen in offer.by_role.items():
                steps = 0.0 if role is Role.PREFILL else self.mix.steps
                stay_s = chosen.ttft_s + steps * chosen.itl_s
                total += counts[role] * chosen.requests_per_s * shares[role] * stay_s
        return total * SATURATION

    def _run(self, nodes: tuple[Node, ...], load: _Load, wanted: float) -> Simulated:
        requests = round(max(MIN_REQUESTS, min(MAX_REQUESTS, wanted)))
        relay = Relay(setup_s=self.relay.setup_ms * 1e-3, chunk_bytes=self.relay.chunk_bytes, work_requests=None)
        streams = tuple(self._stream(kind, load, requests) for kind in self.mix.kinds)
        result = simulate(Scenario(nodes, streams, relay=relay, seed=self.seed))
        return self._judged(result, load.share, requests, steady=wanted <= MAX_REQUESTS)

    def _stream(self, kind: Kind, load: _Load, requests: int) -> Stream:
        own, hits = max(MIN_PER_KIND, round(requests * kind.share)), self.mix.prefix_hit_share
        warmup = int(own * WARMUP_SHARE)
        arrivals: Poisson | ClosedLoop = Poisson(load.requests_per_s * kind.share)
        if self.targets.ttft_s is None:
            # Kinds with long answers are under way for longer. Whole waves, since equal requests stay in step.
            weight = kind.share * kind.osl.mean / self.mix.osl_tokens
            clients = max(1, round(load.clients * weight))
            waves = max(4, math.ceil(own / clients))
            arrivals, own, warmup = ClosedLoop(clients), waves * clients, max(1, int(waves * WARMUP_SHARE)) * clients
        return Stream(
            arrivals,
            own,
            kind.isl,
            kind.osl,
            name=kind.name,
            warmup_requests=warmup,
            prefix_hits=PrefixHits(1.0, hits) if hits > 0 else None,
        )

    def _rate(self, stream: StreamResult) -> float:
        """Requests per second: without the drain at the end, unless all are equal and end in whole waves."""
        in_step = self.targets.ttft_s is None and all(kind.constant for kind in self.mix.kinds)
        return stream.requests_per_s if in_step else stream.steady_requests_per_s

    def _judged(self, result: Result, load: float, requests: int, *, steady: bool) -> Simulated:
        weights = [stream.measured for stream in result.streams]
        total = sum(weights)

        def mean(values: list[float]) -> float:
            return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / total if total else 0.0

        ttft = mean([stream.ttft_s.p50 for stream in result.streams])
        itl = mean([stream.tpot_s.p50 for stream in result.streams])
        late = self.targets.ttft_s is not None and ttft > self.targets.ttft_s * (1 + TOLERANCE)
        slow = self.targets.itl_s is not None and itl > self.targets.itl_s * (1 + TOLERANCE)
        return Simulated(
            load=load,
            requests_per_s=math.fsum(self._rate(stream) for stream in result.streams),
            output_tokens_per_s=math.fsum(
                self._rate(stream) * kind.osl.mean for stream, kind in zip(result.streams, self.mix.kinds, strict=True)
            ),
            ttft_p50_s=ttft,
            ttft_p90_s=mean([stream.ttft_s.p90 for stream in result.streams]),
            itl_s=itl,
            itl_p90_s=mean([stream.tpot_s.p90 for stream in result.streams]),
            e2el_p50_s=mean([stream.e2el_s.p50 for stream in result.streams]),
            within_targets=not (late or slow),
            bottleneck=result.bottleneck,
            requests=requests,
            steady=steady,
        )


def _replicas(offers: tuple[Offers, ...], assignment: Assignment) -> float:
    return math.fsum(
        counts[role] * offer.replicas
        for each, counts in zip(offers, assignment.counts, strict=True)
        for role, offer in each.by_role.items()
    )


def _busy(offers: tuple[Offers, ...], assignment: Assignment, role: Role) -> float:
    """Which part of all servers' rate in that role the plan makes use of."""
    rate = math.fsum(counts[role] * offer.rate(role) for offer, counts in zip(offers, assignment.counts, strict=True))
    return assignment.crossing_per_s / rate if rate > 0 else 0.0
