"""The steady state of prefill nodes that feed decode nodes, in closed form: for searching, where the simulator is too
slow. (`isthmus_planner.cost.meanfield` has that of one aggregated replica.)

By Little's law the sequences that decode at once on a node are `rate · steps · step_s`; so each batch size has one
rate, and each rate one number of requests in the cluster. That number rises with the batch: a closed loop's is found
by bisection, an open one's from its rate. What neither prefill nor decode memory can take waits where the limit is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from isthmus_planner.sim.hardware import Node, Relay, ScenarioError, require, require_number
from isthmus_planner.sim.scenario import Mechanisms

BISECTIONS = 60
"""Each halves what is left of the interval: to rounding."""
QUEUEING_SHARE = 0.05
"""Of the end-to-end latency, as in the simulator's result: below it a queue is no bottleneck."""
FULL_LOAD = 1 - 1e-9
"""Of a limit; at the limit itself a queue has no length."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Means over requests. The last two say how much context the steps see: long outputs make more steps."""

    isl_tokens: float
    osl_tokens: float
    isl_by_steps: float
    """E[ISL · steps] / E[steps], steps being OSL - 1."""
    steps_by_steps: float
    """E[steps²] / E[steps]"""
    cached_tokens: float = 0.0

    @classmethod
    def constant(cls, isl_tokens: float, osl_tokens: float, cached_tokens: float = 0.0) -> Mix:
        return cls(isl_tokens, osl_tokens, isl_tokens, osl_tokens - 1, cached_tokens)

    @property
    def steps(self) -> float:
        return self.osl_tokens - 1

    @property
    def context_tokens(self) -> float:
        """Of a sequence, averaged over its steps."""
        return self.isl_by_steps + (self.steps_by_steps - 1) / 2


@dataclass(frozen=True, slots=True)
class SteadyState:
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s: float
    itl_s: float
    """Of a step, what receiving takes included."""
    e2el_s: float
    batch: float
    """Sequences at once on one decode node."""
    prefill_load: float
    """Of its capacity, 0 to 1; the next three too."""
    decode_load: float
    """Of the batch that memory and seats allow."""
    link_load: float
    bottleneck: str
    """As in the simulator's result: `prefill`, `kv_memory`, `decode_seats`, `transfer`, or where the time goes."""


@dataclass(frozen=True, slots=True)
class Pools:
    """`prefill_nodes` of one kind feed `decode_nodes` of another; either number may be a fraction."""

    prefill: Node
    prefill_nodes: float
    decode: Node
    decode_nodes: float
    mix: Mix
    relay: Relay
    mechanisms: Mechanisms = field(default_factory=Mechanisms)

    def __post_init__(self) -> None:
        require(self.prefill.prefill is not None, f"node {self.prefill.name!r} has no prefill law")
        require(self.decode.decode is not None, f"node {self.decode.name!r} has no decode law")
        require_number("prefill_nodes", self.prefill_nodes, above=0)
        require_number("decode_nodes", self.decode_nodes, above=0)
        require_number("osl_tokens", self.mix.osl_tokens, above=1)
        room = self.decode.kv_capacity_tokens
        if self.mix.isl_tokens + self.mix.osl_tokens > room:
            raise ScenarioError(
                f"a request of {self.mix.isl_tokens + self.mix.osl_tokens:g} tokens cannot fit into the {room} tokens "
                f"of KV of node {self.decode.name!r}"
            )

    # --- decode

    @property
    def most_batch(self) -> float:
        """What seats and memory allow."""
        assert self.decode.decode is not None
        in_memory = self.decode.kv_capacity_tokens / (self.mix.isl_tokens + self.mix.osl_tokens)
        return min(float(self.decode.decode.max_batch), in_memory)

    def bare_step_s(self, batch: float) -> float:
        """As one of the sequences sees it, `batch` being the average over nodes and time: nodes are loaded evenly, so
        that each holds one more or less, and the fuller one has more who see it."""
        law, node = self.decode.decode, self.decode
        assert law is not None
        least = math.floor(batch)
        over = batch - least
        seen = ((1 - over) * least**2 + over * (least + 1) ** 2) / batch
        low = min(law.max_batch, max(1, math.floor(seen)))
        high = min(law.max_batch, low + 1)
        tokens = seen * self.mix.context_tokens
        seconds = law.a_s[low - 1] + (law.a_s[high - 1] - law.a_s[low - 1]) * max(0.0, seen - low)
        seconds += law.b_s_per_token * tokens
        if node.resident_kv is not None and self.mechanisms.resident_kv:
            seconds += node.resident_kv.s_per_token * max(0.0, tokens - node.resident_kv.above_tokens)
        return seconds

    @property
    def disturbance_s(self) -> float:
        """Of a decode node's time, for each request that it receives."""
        node, seconds = self.decode, 0.0
        if node.transfer_stall is not None and self.mechanisms.transfer_stall:
            seconds += node.transfer_stall.stall_s + node.transfer_stall.stall_s_per_token * self.mix.isl_tokens
        if node.descriptor_posting is not None and self.mechanisms.descriptor_posting:
            seconds += node.descriptor_posting.share_per_byte_per_s * self.kv_bytes
        return seconds

    def rate_at(self, batch: float) -> float:
        """Requests per second of all decode nodes when each has so many sequences: `batch / (steps · step_s)`, where
        the step is lengthened by what that rate itself disturbs."""
        bare = self.bare_step_s(batch)
        return self.decode_nodes * batch / (self.mix.steps * bare + batch * self.disturbance_s)

    # --- prefill

    def pass_s(self, prompts: float) -> float:
        """One pass over so many prompts."""
        law = self.prefill.prefill
        assert law is not None
        new = max(1.0, self.mix.isl_tokens - self.mix.cached_tokens)
        passes = max(1.0, math.ceil(new / self.prefill.pass_tokens))
        work = law.token_s * new + law.pair_s * new * (self.mix.cached_tokens + new / 2)
        return law.base_s * passes + max(law.floor_s * passes, work * prompts) + law.extra_token_s * new * prompts

    @property
    def most_prompts(self) -> float:
        """In one pass."""
        new = max(1.0, self.mix.isl_tokens - self.mix.cached_tokens)
        return max(1.0, self.prefill.pass_tokens // new)

    @property
    def prefill_capacity(self) -> float:
        """Requests per second of all prefill nodes, passes full."""
        return self.prefill_nodes * self.most_prompts / self.pass_s(self.most_prompts)

    def ttft_at(self, rate: float) -> float:
        """Queue and pass. The wait for what is under way is half a pass on average; a pass that begins takes all who
        wait, up to its limit, so that prompts wait for one another only as far as one pass cannot hold them."""
        per_node = rate / self.prefill_nodes
        prompts = 1.0
        for _ in range(BISECTIONS):
            prompts = min(self.most_prompts, max(1.0, per_node * self.pass_s(prompts)))
        seconds = self.pass_s(prompts)
        load = min(FULL_LOAD, per_node * seconds / prompts)
        return seconds + load * seconds / 2 + max(0.0, load - 0.5) ** 2 * seconds / (1 - load)

    # --- transfer

    @property
    def kv_bytes(self) -> float:
        return self.mix.isl_tokens * self.prefill.kv_bytes_per_token

    @property
    def transfer_s(self) -> float:
        """Of one request alone on its lane."""
        relay = self.relay
        rate = min(relay.lane_bytes_per_s, self.prefill.link_bytes_per_s, self.decode.link_bytes_per_s)
        posting = self.decode.descriptor_posting
        if posting is not None and self.mechanisms.descriptor_posting and posting.post_s > 0:
            rate = min(rate, posting.bytes_per_descriptor * posting.ranks / posting.post_s)
        burst = relay.chunk_bytes * relay.burst_chunks
        return relay.setup_s + max(self.kv_bytes / rate, (self.kv_bytes - burst) / relay.pace_bytes_per_s)

    @property
    def link_capacity(self) -> float:
        """Requests per second: lanes one after the other, links of both sides."""
        lanes = self.prefill_nodes * self.decode_nodes
        relay, bytes_each = self.relay, max(self.kv_bytes, 1.0)
        by_lane = lanes / max(self.transfer_s, relay.setup_s + bytes_each / relay.pace_bytes_per_s, 1e-12)
        links = min(
            self.prefill_nodes * self.prefill.link_bytes_per_s, self.decode_nodes * self.decode.link_bytes_per_s
        )
        return min(by_lane, links / bytes_each)

    # --- all of it

    @property
    def limits(self) -> dict[str, float]:
        """Requests per second that each resource allows."""
        assert self.decode.decode is not None
        seats = self.most_batch >= self.decode.decode.max_batch
        decode = "decode_seats" if seats else "kv_memory"
        return {"prefill": self.prefill_capacity, decode: self.rate_at(self.most_batch), "transfer": self.link_capacity}

    def closed_loop(self, clients: float) -> SteadyState:
        """So many requests are always under way."""
        require_number("clients", clients, at_least=1)
        limits = self.limits
        scarce = min(limits, key=lambda name: limits[name])
        most_rate = FULL_LOAD * limits[scarce]
        low, high = 0.0, self.most_batch
        for _ in range(BISECTIONS):
            batch = (low + high) / 2
            if self.rate_at(batch) < most_rate:
                low = batch
            else:
                high = batch
        most_batch = low
        if self._in_cluster(most_batch) <= clients:
            return self._state(most_batch, clients, scarce)
        low, high = 0.0, most_batch
        for _ in range(BISECTIONS):
            batch = (low + high) / 2
            if self._in_cluster(batch) < clients:
                low = batch
            else:
                high = batch
        return self._state(high, clients, None)

    def open_loop(self, rate_per_s: float) -> SteadyState:
        """ScenarioError where the rate exceeds what a resource allows: there is no steady state."""
        require_number("rate_per_s", rate_per_s, above=0)
        limits = self.limits
        scarce = min(limits, key=lambda name: limits[name])
        require(
            rate_per_s < limits[scarce],
            f"{rate_per_s:g} requests/s are more than {scarce} allows ({limits[scarce]:g}); queues grow for ever",
        )
        low, high = 0.0, self.most_batch
        for _ in range(BISECTIONS):
            batch = (low + high) / 2
            if self.rate_at(batch) < rate_per_s:
                low = batch
            else:
                high = batch
        return self._state(high, self._in_cluster(high), None)

    def _in_cluster(self, batch: float) -> float:
        rate = self.rate_at(batch)
        return rate * (self.ttft_at(rate) + self.transfer_s + self._seat_s(batch)) + self.decode_nodes * batch

    def _seat_s(self, batch: float) -> float:
        """From landing to the next boundary: half a step, if one is under way."""
        return self.bare_step_s(batch) / 2 * min(1.0, batch)

    def _state(self, batch: float, in_cluster: float, scarce: str | None) -> SteadyState:
        rate, limits = self.rate_at(batch), self.limits
        served = {"prefill_time": self.pass_s(1.0), "decode_time": self.decode_nodes * batch / rate}
        e2el = in_cluster / rate
        ttft = self.ttft_at(rate)
        if scarce is None and ttft - served["prefill_time"] > QUEUEING_SHARE * e2el:
            scarce = "prefill"
        elif scarce == "prefill":
            ttft = e2el - self.transfer_s - self._seat_s(batch) - served["decode_time"]
        return SteadyState(
            requests_per_s=rate,
            output_tokens_per_s=rate * self.mix.osl_tokens,
            ttft_s=ttft,
            itl_s=self.decode_nodes * batch / (rate * self.mix.steps),
            e2el_s=e2el,
            batch=batch,
            prefill_load=min(1.0, rate / limits["prefill"]),
            decode_load=min(1.0, batch / self.most_batch),
            link_load=min(1.0, rate / limits["transfer"]),
            bottleneck=scarce or max(served, key=lambda name: served[name]),
        )
