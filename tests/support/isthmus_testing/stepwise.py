"""The simulator's rules once more, the slow way: an event for each decode step and for each chunk of KV.

Nothing is taken from the simulator but the scenario's types; pacing is the relay core's own `Pacer`. One model, one
stream, no prefix cache; a lane shares no link (links are infinitely fast, a lane's own limit is the relay's).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from isthmus_kvrelay.core.pacer import Pacer
from isthmus_planner.sim.hardware import Interleave, Node, Role
from isthmus_planner.sim.scenario import Scenario
from isthmus_planner.sim.workload import ClosedLoop


@dataclass(slots=True, eq=False)
class Request:
    number: int
    sent_at: float
    isl: int
    osl: int
    left: int = 0
    taken: int = 0
    """New prompt tokens in the pass under way."""
    started_at: float | None = None
    first_at: float = 0.0
    granted_at: float = 0.0
    landed_at: float = 0.0
    seated_at: float = 0.0
    ended_at: float = 0.0
    to_decode: int = 0
    held: int = 0
    gaps: list[float] = field(default_factory=list)
    last_at: float = 0.0
    prefill: int = -1
    decode: int = -1


@dataclass(slots=True, eq=False)
class Engine:
    node: Node
    number: int
    queue: list[Request] = field(default_factory=list)
    passing: list[Request] = field(default_factory=list)
    room: list[Request] = field(default_factory=list)
    landed: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    assigned: list[Request] = field(default_factory=list)
    doing: str = "idle"
    since: float = 0.0
    stall: float = 0.0
    kv_used: int = 0
    kv_peak: int = 0
    staging_used: int = 0
    share: float = 0.0
    work_left: float = 0.0
    work_at: float = 0.0
    version: int = 0
    steps: int = 0

    @property
    def tokens(self) -> int:
        return sum(request.held for request in self.running)


@dataclass(slots=True, eq=False)
class Lane:
    pacer: Pacer
    waiting: list[Request] = field(default_factory=list)
    busy: Request | None = None
    share: float = 0.0


class StepwiseSimulator:
    """`requests`: (time sent, ISL, OSL) in order; with a closed loop the times are not looked at."""

    def __init__(self, scenario: Scenario, requests: list[tuple[float, int, int]]) -> None:
        self.scenario, self.relay, self.on = scenario, scenario.relay, scenario.mechanisms
        self.engines = [Engine(node, number) for number, node in enumerate(scenario.nodes)]
        self.lanes: dict[tuple[int, int], Lane] = {}
        self.events: list[tuple[float, int, int, object]] = []
        self.counter = 0
        self.now = 0.0
        self.done: list[Request] = []
        (stream,) = scenario.streams
        self.overhead = stream.overhead_s
        self.waiting = [Request(number, at, isl, osl) for number, (at, isl, osl) in enumerate(requests)]
        if isinstance(stream.arrivals, ClosedLoop):
            for _ in range(stream.arrivals.clients):
                self._client_free()
        else:
            for request in self.waiting:
                self._at(request.sent_at + self.overhead, 0, ("arrive", request))
            self.waiting = []

    def run(self) -> list[Request]:
        while self.events:
            self.now, _, _, event = heapq.heappop(self.events)
            match event:
                case ("arrive", request):
                    self._arrive(request)
                case ("work", engine, version):
                    if engine.version == version:
                        self._work_done(engine)
                case ("landed", lane, engine):
                    self._landed(lane, engine)
                case ("chunk", lane, engine, left):
                    self._chunk(lane, engine, left)
        return self.done

    def _at(self, at: float, order: int, event: object) -> None:
        self.counter += 1
        heapq.heappush(self.events, (at, order, self.counter, event))

    def _client_free(self) -> None:
        if self.waiting:
            request = self.waiting.pop(0)
            request.sent_at = self.now
            self._at(self.now + self.overhead, 0, ("arrive", request))

    # --- routes

    def _prefill_s(self, node: Node, new: int) -> float:
        law = node.prefill
        assert law is not None
        passes = math.ceil(new / node.pass_tokens)
        work = law.token_s * new + law.pair_s * new * 0.5 * new
        return law.base_s * passes + max(law.floor_s * passes, work) + law.extra_token_s * new

    def _backlog_s(self, engine: Engine) -> float:
        total = sum(self._prefill_s(engine.node, request.isl) for request in engine.queue)
        under_way = self.now - engine.since if engine.passing else 0.0
        return max(0.0, total - under_way)

    def _predicted_step_s(self, engine: Engine, request: Request) -> float:
        node = engine.node
        assert node.decode is not None
        kv = sum(other.isl + other.osl for other in [*engine.assigned, request])
        batch = len(engine.assigned) + 1
        crowd = max(1.0, batch / node.decode.max_batch, kv / node.kv_capacity_tokens)
        tokens = sum(other.isl + 0.5 * other.osl for other in [*engine.assigned, request]) / crowd
        return self._step_s(engine, min(batch, node.decode.max_batch), tokens) * crowd

    def _step_s(self, engine: Engine, batch: int, tokens: float) -> float:
        node = engine.node
        assert node.decode is not None
        seconds = node.decode.a_s[batch - 1] + node.decode.b_s_per_token * tokens
        if node.resident_kv is not None and self.on.resident_kv:
            seconds += node.resident_kv.s_per_token * max(0.0, tokens - node.resident_kv.above_tokens)
        return seconds

    def _arrive(self, request: Request) -> None:
        def least(scores: list[tuple[float, int]]) -> tuple[float, int]:
            return min(scores, default=(math.inf, -1))

        def ttft(engine: Engine) -> float:
            return self._backlog_s(engine) + self._prefill_s(engine.node, request.isl)

        by_role = {role: [e for e in self.engines if e.node.role is role] for role in Role}
        p = least([(ttft(e), e.number) for e in by_role[Role.PREFILL]])
        d = least([(self._predicted_step_s(e, request) * request.osl, e.number) for e in by_role[Role.DECODE]])
        whole = least(
            [(self._predicted_step_s(e, request) * request.osl + ttft(e), e.number) for e in by_role[Role.AGGREGATED]]
        )
        if whole[0] <= p[0] + d[0]:
            p = d = whole
        request.prefill, request.decode, request.left = p[1], d[1], request.isl
        self.engines[d[1]].assigned.append(request)
        engine = self.engines[p[1]]
        engine.queue.append(request)
        if engine.doing == "idle":
            self._go_on(engine)

    # --- work

    def _begin(self, engine: Engine, doing: str, seconds: float) -> None:
        engine.doing, engine.since, engine.work_left, engine.work_at = doing, self.now, seconds, self.now
        self._time(engine)

    def _speed(self, engine: Engine) -> float:
        return max(0.02, 1.0 - engine.share) if engine.doing in ("step", "stall") else 1.0

    def _time(self, engine: Engine) -> None:
        engine.version += 1
        at = engine.work_at + engine.work_left / self._speed(engine)
        self._at(max(self.now, at), 1, ("work", engine, engine.version))

    def _set_share(self, engine: Engine, share: float) -> None:
        if engine.doing in ("step", "stall"):
            engine.work_left -= (self.now - engine.work_at) * self._speed(engine)
            engine.work_at = self.now
            engine.share = share
            self._time(engine)
        engine.share = share

    def _work_done(self, engine: Engine) -> None:
        doing, engine.doing = engine.doing, "idle"
        if doing in ("step", "mixed"):
            engine.steps += 1
            for request in engine.running:
                request.gaps.append(self.now - request.last_at)
                request.last_at = self.now
                request.to_decode -= 1
                request.held += 1
            ended = sorted((r for r in engine.running if r.to_decode == 0), key=lambda r: r.number)
            engine.running = [request for request in engine.running if request.to_decode > 0]
            for request in ended:
                self._end(engine, request)
        for request in list(engine.passing):
            engine.passing.remove(request)
            request.left -= request.taken
            if request.left == 0:
                engine.queue.remove(request)
                self._first_token(engine, request)
        if engine.node.role is Role.DECODE:
            self._admit(engine)
        self._go_on(engine)

    def _go_on(self, engine: Engine) -> None:
        node = engine.node
        while engine.landed and node.decode is not None and len(engine.running) < node.decode.max_batch:
            request = engine.landed.pop(0)
            self._seat(engine, request)
            if node.transfer_stall is not None and self.on.transfer_stall:
                engine.stall += node.transfer_stall.stall_s + node.transfer_stall.stall_s_per_token * request.isl
        if engine.queue and self._begin_prompts(engine):
            return
        if engine.stall > 0:
            seconds, engine.stall = engine.stall, 0.0
            self._begin(engine, "stall", seconds)
        elif engine.running:
            self._begin(engine, "step", self._step_s(engine, len(engine.running), engine.tokens))
        else:
            engine.doing = "idle"

    def _may_start(self, engine: Engine, request: Request) -> bool:
        node = engine.node
        if node.role is Role.PREFILL:
            if node.staging_tokens is not None and engine.staging_used + request.isl > node.staging_tokens:
                return False
            engine.staging_used += request.isl
        else:
            assert node.decode is not None
            need = request.isl + request.osl
            if engine.kv_used + need > node.kv_capacity_tokens:
                return False
            if len(engine.running) + len(engine.passing) >= node.decode.max_batch:
                return False
            self._hold(engine, need)
        request.started_at = self.now
        return True

    def _begin_prompts(self, engine: Engine) -> bool:
        node, law = engine.node, engine.node.prefill
        assert law is not None
        mixes = node.role is Role.AGGREGATED and node.interleave is Interleave.MIXED
        budget = max(1, node.pass_tokens - (len(engine.running) if mixes else 0))
        work, tokens, passes = 0.0, 0, 1
        for request in engine.queue:
            if budget <= 0:
                break
            take = min(request.left, budget)
            if node.role is Role.PREFILL and take < request.left:
                if engine.passing:
                    break
                take, passes = request.left, math.ceil(request.left / node.pass_tokens)
            if request.started_at is None and not self._may_start(engine, request):
                break
            before = request.isl - request.left
            work += law.token_s * take + law.pair_s * take * (before + 0.5 * take)
            tokens += take
            budget -= take
            request.taken = take
            engine.passing.append(request)
        if not engine.passing:
            return False
        seconds = law.base_s * passes + max(law.floor_s * passes, work) + law.extra_token_s * tokens
        if engine.running and self.on.aggregated_interference:
            seconds *= 1 + node.interference
        if mixes and engine.running:
            self._begin(engine, "mixed", seconds + self._step_s(engine, len(engine.running), engine.tokens))
        else:
            self._begin(engine, "prompts", seconds)
        return True

    def _first_token(self, engine: Engine, request: Request) -> None:
        request.first_at = request.last_at = self.now
        request.granted_at = request.landed_at = request.seated_at = self.now
        if request.osl == 1:
            if engine.node.role is Role.PREFILL:
                engine.staging_used -= request.isl
            self._end(self.engines[request.decode], request)
        elif engine.node.role is Role.PREFILL:
            decode = self.engines[request.decode]
            decode.room.append(request)
            self._admit(decode)
        else:
            self._seat(engine, request)

    def _seat(self, engine: Engine, request: Request) -> None:
        request.seated_at = self.now
        request.to_decode, request.held = request.osl - 1, request.isl
        engine.running.append(request)

    def _hold(self, engine: Engine, tokens: int) -> None:
        engine.kv_used += tokens
        engine.kv_peak = max(engine.kv_peak, engine.kv_used)

    def _end(self, engine: Engine, request: Request) -> None:
        request.ended_at = self.now
        engine.assigned.remove(request)
        if request.prefill == request.decode or request.osl > 1:
            engine.kv_used -= request.isl + request.osl
        self.done.append(request)
        self._client_free()

    # --- KV on its way

    def _admit(self, engine: Engine) -> None:
        while engine.room:
            request = engine.room[0]
            if engine.kv_used + request.isl + request.osl > engine.node.kv_capacity_tokens:
                return
            engine.room.pop(0)
            self._hold(engine, request.isl + request.osl)
            request.granted_at = self.now
            key = request.prefill, request.decode
            if key not in self.lanes:
                burst = self.relay.chunk_bytes * self.relay.burst_chunks
                pacer = Pacer(rate_bytes_per_s=self.relay.pace_bytes_per_s, burst_bytes=burst, now_s=0.0)
                self.lanes[key] = Lane(pacer)
            lane = self.lanes[key]
            lane.waiting.append(request)
            if lane.busy is None:
                self._send(lane, engine)

    def _wire(self, engine: Engine) -> float:
        rate = self.relay.host_bytes_per_s
        if self.relay.work_requests is not None and self.relay.credit_round_trip_s > 0:
            window = self.relay.work_requests * self.relay.chunk_bytes
            rate = min(rate, window / self.relay.credit_round_trip_s)
        posting = engine.node.descriptor_posting
        if posting is not None and self.on.descriptor_posting and posting.post_s > 0:
            rate = min(rate, posting.bytes_per_descriptor * posting.ranks / posting.post_s)
        return rate

    def _send(self, lane: Lane, engine: Engine) -> None:
        lane.busy = lane.waiting.pop(0)
        size = lane.busy.isl * int(self.engines[lane.busy.prefill].node.kv_bytes_per_token)
        begins = self.now + self.relay.setup_s
        resident = engine.node.resident_kv
        if resident is not None and self.on.resident_kv:
            above = max(0.0, engine.kv_used - resident.above_tokens)
            begins += resident.receive_s_per_pair * lane.busy.isl * above
        queue = engine.node.nic_queue
        if queue is not None and self.on.nic_queue_overflow:
            per_flow = size
            if self.relay.work_requests is not None:
                per_flow = min(size, self.relay.work_requests * self.relay.chunk_bytes)
            wanted = math.ceil(per_flow / queue.bytes_per_descriptor)
            under_way = 0
            for (_, d), other in self.lanes.items():
                if d == engine.number and other.busy is not None and other is not lane:
                    there = other.busy.isl * int(self.engines[other.busy.prefill].node.kv_bytes_per_token)
                    if self.relay.work_requests is not None:
                        there = min(there, self.relay.work_requests * self.relay.chunk_bytes)
                    under_way += math.ceil(there / queue.bytes_per_descriptor)
            if under_way + wanted > queue.depth:
                begins += queue.retry_s
        posting = engine.node.descriptor_posting
        if posting is not None and self.on.descriptor_posting:
            takes = self._dry_run(lane, engine, size, begins)
            lane.share = size / takes * posting.share_per_byte_per_s
            self._set_share(engine, engine.share + lane.share)
        self._at(begins, 2, ("chunk", lane, engine, size))

    def _dry_run(self, lane: Lane, engine: Engine, size: int, begins: float) -> float:
        """What the transfer will take, chunk by chunk on a copy of its bucket."""
        pacer, now = Pacer(rate_bytes_per_s=lane.pacer.rate, burst_bytes=1, now_s=0.0), begins
        for name in Pacer.__dict__.get("__slots__", vars(lane.pacer)):
            setattr(pacer, name, getattr(lane.pacer, name))
        left = size
        while left:
            chunk = min(left, self.relay.chunk_bytes)
            now = pacer.ready_at_s(chunk, now_s=now)
            pacer.spend(chunk, now_s=now)
            now += chunk / self._wire(engine)
            left -= chunk
        return now - begins

    def _chunk(self, lane: Lane, engine: Engine, left: int) -> None:
        if left == 0:
            self._landed(lane, engine)
            return
        chunk = min(left, self.relay.chunk_bytes)
        ready = lane.pacer.ready_at_s(chunk, now_s=self.now)
        if ready > self.now:
            self._at(ready, 2, ("chunk", lane, engine, left))
            return
        lane.pacer.spend(chunk, now_s=self.now)
        self._at(self.now + chunk / self._wire(engine), 2, ("chunk", lane, engine, left - chunk))

    def _landed(self, lane: Lane, engine: Engine) -> None:
        request = lane.busy
        assert request is not None
        request.landed_at, lane.busy = self.now, None
        if lane.share:
            self._set_share(engine, max(0.0, engine.share - lane.share))
            lane.share = 0.0
        if lane.waiting:
            self._send(lane, engine)
        engine.landed.append(request)
        if engine.doing == "idle":
            self._go_on(engine)
        source = self.engines[request.prefill]
        source.staging_used -= request.isl
        if source.doing == "idle":
            self._go_on(source)
