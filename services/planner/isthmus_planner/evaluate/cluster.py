"""The simulated cluster: arrivals, engines, lanes, heartbeats, and a policy that decides. From event to event."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from isthmus_planner.evaluate.engine import BLOCK_TOKENS, NEVER, Effects, Engine
from isthmus_planner.evaluate.engine import Sequence as Part
from isthmus_planner.evaluate.fleet import LANE_SETUP_S, WorkerSpec
from isthmus_planner.evaluate.ports import Ask, Held, Placed, Policy, Refused, Verdict
from isthmus_shared.ids import Incarnation, NodeId, RequestId, WorkerId
from isthmus_shared.messages.health import HEARTBEAT_INTERVAL_S, ProcessState, RelayHeartbeat, Role, WorkerHeartbeat
from isthmus_shared.messages.outcomes import Outcome
from isthmus_shared.messages.route import Mode
from isthmus_shared.messages.work import RelayRef, WorkerRef

HOP_S = 0.001
"""A message over the bus and its handling: route, submit."""
POLL_S = 0.05
"""Between two looks at what is held in line."""
MODEL_LEN_TOKENS = 131_072
POOL_BYTES = 1 << 40
"""Staging is no bottleneck here."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a trace says."""

    at_s: float
    isl_tokens: int
    osl_tokens: int
    tenant: str = ""


@dataclass(slots=True)
class Record:
    """What became of it. Times since the run's start."""

    ask: Ask
    osl_tokens: int
    placed: Placed | None = None
    placed_s: float = NEVER
    first_s: float = NEVER
    end_s: float = NEVER
    refused: Refused | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.ask.came_s

    @property
    def itl_s(self) -> float:
        """Mean over the answer; 0 for one of a single token."""
        return (self.end_s - self.first_s) / (self.osl_tokens - 1) if self.osl_tokens > 1 else 0.0

    @property
    def good(self) -> bool:
        """Whether it met both of its targets."""
        slo = self.ask.slo
        if self.end_s == NEVER or slo is None:
            return self.end_s != NEVER
        late = slo.ttft_s is not None and self.ttft_s > slo.ttft_s
        slow = slo.itl_s is not None and self.itl_s > slo.itl_s
        return not (late or slow)


@dataclass(frozen=True, slots=True)
class Hook:
    """Called every so many seconds of simulated time: a roles' policy, a fault."""

    every_s: float
    call: Callable[[Cluster, float], None]


@dataclass(slots=True)
class SimulatedWorker:
    spec: WorkerSpec
    engine: Engine
    roles: tuple[Role, ...]
    ref: WorkerRef
    relay: RelayRef
    sends_from_s: float = 0.0
    """Its lane is busy until then."""
    takes_from_s: float = 0.0
    sent_bytes: int = 0
    taken_bytes: int = 0


@dataclass(slots=True)
class Cluster:
    workers: list[SimulatedWorker]
    policy: Policy
    records: list[Record] = field(default_factory=list)
    now_s: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: itertools.count[int] = field(default_factory=itertools.count)
    _open: int = 0
    """Requests that have not ended."""

    @classmethod
    def of(cls, specs: Sequence[WorkerSpec], policy: Policy) -> Cluster:
        return cls([_worker(spec, number) for number, spec in enumerate(specs)], policy)

    def run(
        self, requests: Iterable[Request], make_ask: Callable[[int, Request], Ask], hooks: Sequence[Hook] = ()
    ) -> None:
        """Until every request has ended or was refused."""
        for number, request in enumerate(requests):
            ask = make_ask(number, request)
            self.records.append(Record(ask, request.osl_tokens))
            self._at(request.at_s, partial(self._arrive, ask))
            self._open += 1
        for index in range(len(self.workers)):
            # Processes start when they start: beats are spread over the interval.
            self._at(-HEARTBEAT_INTERVAL_S * (index + 1) / len(self.workers), partial(self._beat, index))
        self._at(POLL_S, self._poll)
        for hook in hooks:
            self._at(hook.every_s, partial(self._hook, hook))
        while self._open:
            self.now_s, _, act = heapq.heappop(self._events)
            act()

    def slow_down(self, index: int, factor: float) -> None:
        """A fault: from its next step on, all steps of that worker take so many times as long."""
        engine = self.workers[index].engine
        before_s = engine.wake_s
        engine.slow_down(factor, self.now_s)
        if engine.wake_s != before_s:
            self._wake(index)

    def assign(self, index: int, roles: tuple[Role, ...]) -> None:
        """A role change: the next heartbeat shows it; what runs there finishes."""
        self.workers[index].roles = roles

    # -- events -----------------------------------------------------------------------------------------------------

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._count), act))

    def _arrive(self, ask: Ask) -> None:
        self._take(ask, self.policy.ask(ask, self.now_s))

    def _poll(self) -> None:
        for ask, verdict in self.policy.poll(self.now_s):
            self._take(ask, verdict)
        self._at(self.now_s + POLL_S, self._poll)

    def _hook(self, hook: Hook) -> None:
        hook.call(self, self.now_s)
        self._at(self.now_s + hook.every_s, partial(self._hook, hook))

    def _beat(self, index: int) -> None:
        self.policy.beat(index, self.heartbeat(index), self.now_s)
        self.policy.relay_beat(self.relay_heartbeat(index), self.now_s)
        self._at(self.now_s + HEARTBEAT_INTERVAL_S, partial(self._beat, index))

    def _take(self, ask: Ask, verdict: Verdict) -> None:
        record = self.records[ask.number]
        match verdict:
            case Held():
                return
            case Refused():
                record.refused = verdict
                self._open -= 1
            case Placed():
                record.placed, record.placed_s = verdict, self.now_s
                self._submit(record, verdict)

    def _submit(self, record: Record, placed: Placed) -> None:
        index = placed.decode if placed.prefill is None else placed.prefill
        engine = self.workers[index].engine
        isl_tokens = record.ask.isl_tokens
        if placed.prefill is not None and record.osl_tokens > 1:
            self.workers[placed.decode].engine.loading += 1
        part = Part(
            record.ask.number,
            isl_tokens,
            record.osl_tokens,
            prefill_only=placed.prefill is not None,
        )
        engine.announced += 1
        engine.announced_tokens += isl_tokens

        def enter() -> None:
            engine.announced -= 1
            engine.announced_tokens -= isl_tokens
            self._give(index, part)

        self._at(self.now_s + HOP_S + engine.spec.prefill.base_s, enter)

    def _give(self, index: int, part: Part) -> None:
        engine = self.workers[index].engine
        before_s = engine.wake_s
        engine.submit(part, self.now_s)
        if engine.wake_s != before_s:
            self._wake(index)

    def _wake(self, index: int) -> None:
        engine = self.workers[index].engine
        at_s = engine.wake_s
        if at_s is not NEVER:
            self._at(at_s, partial(self._advance, index, at_s))

    def _advance(self, index: int, due_s: float) -> None:
        engine = self.workers[index].engine
        if engine.wake_s != due_s:
            return  # another wake-up has taken its place
        effects = engine.advance(self.now_s)
        self._wake(index)
        self._apply(index, effects)

    def _apply(self, index: int, effects: Effects) -> None:
        for part in effects.first:
            record = self.records[part.number]
            record.first_s = self.now_s + HOP_S
            self.policy.prefilled(index, part.isl_tokens)
        for part in effects.prefilled:
            record = self.records[part.number]
            if record.osl_tokens <= 1:
                self._end(record)
            else:
                self._send(index, record)
        for part in effects.finished:
            self._end(self.records[part.number])

    def _send(self, index: int, record: Record) -> None:
        """Its KV crosses: first come, first served at both ends."""
        assert record.placed is not None
        source, target = self.workers[index], self.workers[record.placed.decode]
        size = source.spec.kv_bytes_per_token * record.ask.isl_tokens + source.spec.kv_bytes_per_prompt
        begin_s = max(self.now_s, source.sends_from_s, target.takes_from_s)
        took_s = size / min(source.spec.lane_bytes_per_s, target.spec.lane_bytes_per_s)
        source.sends_from_s = target.takes_from_s = begin_s + took_s

        def landed() -> None:
            assert record.placed is not None
            target.engine.loading -= 1
            source.sent_bytes += int(size)
            target.taken_bytes += int(size)
            part = Part(record.ask.number, record.ask.isl_tokens, record.osl_tokens, loaded=True)
            self._give(record.placed.decode, part)

        self._at(begin_s + took_s + LANE_SETUP_S, landed)

    def _end(self, record: Record) -> None:
        record.end_s = self.now_s + HOP_S
        self._open -= 1
        assert record.placed is not None
        self.policy.ended(record.placed.prefill, record.placed.decode, self.outcome(record))

    # -- what the processes tell ------------------------------------------------------------------------------------

    def heartbeat(self, index: int) -> WorkerHeartbeat:
        worker = self.workers[index]
        return WorkerHeartbeat(
            incarnation=worker.ref.incarnation,
            state=ProcessState.READY,
            interval_s=HEARTBEAT_INTERVAL_S,
            worker_id=worker.ref.worker_id,
            node_id=worker.ref.node_id,
            roles=worker.roles,
            vendor=worker.spec.vendor,
            engine="sim",
            model="simulated",
            model_fingerprint="simulated",
            kv_form=worker.spec.kv_form,
            kv_layout="simulated",
            max_model_len_tokens=MODEL_LEN_TOKENS,
            kv_block_tokens=BLOCK_TOKENS,
            relay=worker.relay,
            load=worker.engine.load(self.now_s),
        )

    def relay_heartbeat(self, index: int) -> RelayHeartbeat:
        worker = self.workers[index]
        return RelayHeartbeat(
            incarnation=worker.relay.incarnation,
            state=ProcessState.READY,
            interval_s=HEARTBEAT_INTERVAL_S,
            relay=worker.relay,
            pool_bytes=POOL_BYTES,
            pool_free_bytes=POOL_BYTES,
            flows_out=0,
            flows_in=0,
            credits_outstanding_bytes=0,
            slots_quarantined=0,
            sent_bytes=worker.sent_bytes,
            received_bytes=worker.taken_bytes,
        )

    def outcome(self, record: Record) -> Outcome:
        placed = record.placed
        assert placed is not None
        return Outcome(
            request_id=RequestId(f"req-{record.ask.number}"),
            model="simulated",
            tenant=record.ask.tenant,
            slo_class="" if record.ask.slo is None else record.ask.slo.name,
            mode=Mode.AGGREGATED if placed.prefill is None else Mode.DISAGGREGATED,
            prefill=None if placed.prefill is None else self.workers[placed.prefill].ref,
            decode=self.workers[placed.decode].ref,
            isl_tokens=record.ask.isl_tokens,
            osl_tokens=record.osl_tokens,
            queued_s=max(0.0, record.placed_s - record.ask.came_s),
            ttft_s=record.ttft_s,
            itl_s=record.itl_s if record.osl_tokens > 1 else None,
            e2el_s=record.end_s - record.ask.came_s,
            predicted=placed.predicted,
            finish="stop",
        )


def _worker(spec: WorkerSpec, number: int) -> SimulatedWorker:
    life = Incarnation(f"inc-{number:04d}")
    ref = WorkerRef(worker_id=WorkerId(spec.name), incarnation=life, node_id=NodeId(f"node-{spec.name}"))
    relay = RelayRef(node_id=ref.node_id, incarnation=Incarnation(f"inc-relay-{number:04d}"), address="simulated:0")
    return SimulatedWorker(spec, Engine(spec.engine), spec.roles, ref, relay)
