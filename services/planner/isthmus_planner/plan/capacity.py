"""What one server sustains in each role within the targets: closed forms, the search's coefficients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from isthmus_planner.cost import kv, memory
from isthmus_planner.cost.constants import Constants
from isthmus_planner.cost.laws import DecodeLaw, PrefillLaw, decode_law, prefill_law
from isthmus_planner.cost.layout import Layout, Precision
from isthmus_planner.cost.profiles import AcceleratorProfile, ModelProfile
from isthmus_planner.plan.inputs import RelaySpec
from isthmus_planner.plan.mix import Mix
from isthmus_planner.sim.hardware import Role
from isthmus_shared.errors import ConfigInvalid

BLOCK_CHOICES_TOKENS = (16, 32, 64, 128)
"""What engines offer."""
BLOCK_TOLERANCE = 0.005
"""The smallest block within half a percent of the best rate: larger ones waste memory and share prefixes worse."""
LOAD_STEPS = 96
MAX_LOAD = 0.95
"""Of prefill where requests arrive at random; above, the queue has no useful end."""
PACING_HEADROOM = 1.25
"""Allowed rate over the mean one, so that a prompt that is longer than most does not wait for the pacer."""


@dataclass(frozen=True, slots=True)
class Targets:
    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(frozen=True, slots=True)
class NodeType:
    """Equal servers, ready for the laws."""

    name: str
    accelerator: AcceleratorProfile
    constants_for: Callable[[Layout, float | None], Constants]
    """For a layout, and sequences at once (None: not known yet)."""
    count: int
    accelerators: int
    price_usd_per_h: float | None
    """Of one server."""
    nic_bytes_per_s: float | None
    """Of one server; None: unknown, so no KV may cross to or from it."""
    tp_choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """One server of a type in one role, at the most that the targets allow."""

    role: Role
    tp: int
    replicas: int
    requests_per_s: float
    """0: not within the targets."""
    max_batch: int
    """Of one replica; 0 where it does not decode."""
    itl_s: float
    ttft_s: float
    """Without a queue where no TTFT target is given."""
    limit: str
    """What it is that allows no more."""
    constants: Constants
    """What it was computed with."""
    block_tokens: int = 16
    receive_bytes_per_s: float = 0.0
    """KV that one replica takes in at that rate."""


@dataclass(frozen=True, slots=True)
class Offers:
    node: NodeType
    by_role: dict[Role, Offer]
    refused: dict[Role, tuple[str, ...]]
    """Why a role has no offer, from the smallest tp to the largest."""

    def rate(self, role: Role) -> float:
        offer = self.by_role.get(role)
        return offer.requests_per_s if offer is not None else 0.0


def layouts(node: NodeType, model: ModelProfile, kv_precision: Precision) -> tuple[list[Layout], str]:
    """Those whose weights fit, and why others do not."""
    fitting, why = [], ""
    for tp in node.tp_choices:
        layout = Layout(tp=tp, kv=kv_precision)
        try:
            memory.fit(node.accelerator, model, layout)
        except ConfigInvalid as error:
            why = f"{error.what}: {error.why}" if error.why else error.what
            continue
        fitting.append(layout)
    return fitting, why


def offers(
    node: NodeType,
    model: ModelProfile,
    mix: Mix,
    targets: Targets,
    *,
    relay: RelaySpec,
    kv_precision: Precision = Precision.BF16,
    max_batch: int = 1024,
) -> Offers:
    """The best layout for each role; a figure that is unknown leaves the roles out that need it, and says so."""
    fitting, why_not = layouts(node, model, kv_precision)
    found: dict[Role, Offer] = {}
    refused: dict[Role, tuple[str, ...]] = {}
    for role in Role:
        if not fitting:
            refused[role] = (why_not,)
            continue
        candidates: list[Offer] = []
        whys: list[str] = []
        for layout in fitting:
            try:
                maker = _Maker(node, model, mix, targets, relay, layout, max_batch, node.constants_for(layout, None))
                candidates.append(maker.offer(role))
            except ConfigInvalid as error:
                whys.append(error.what)
        best = _best(candidates)
        if best is not None and best.requests_per_s > 0:
            found[role] = best
        else:
            whys += [offer.limit for offer in candidates]
            refused[role] = tuple(dict.fromkeys(whys))
    return Offers(node, found, refused)


def _best(candidates: Iterable[Offer]) -> Offer | None:
    """The highest rate; among equals the larger tp, whose latency is lower."""
    return max(candidates, key=lambda offer: (offer.requests_per_s, offer.tp), default=None)


@dataclass(frozen=True, slots=True)
class _Maker:
    node: NodeType
    model: ModelProfile
    mix: Mix
    targets: Targets
    relay: RelaySpec
    layout: Layout
    max_batch: int
    constants: Constants

    @property
    def replicas(self) -> int:
        return self.node.accelerators // self.layout.tp

    @property
    def kv_bytes(self) -> float:
        """Of a mean prompt, on the wire."""
        return self.mix.prompt_mean(
            lambda new, cached: (
                kv.full_bytes_per_token(self.model, self.layout) * (new + cached)
                + self.model.window_layers
                * np.minimum(new + cached, self.model.window_tokens)
                * kv.layer_bytes_per_token(self.model, self.layout)
            )
        )

    def offer(self, role: Role) -> Offer:
        if role is Role.PREFILL:
            return self._prefill()
        if role is Role.DECODE:
            made = [self._decode(block) for block in BLOCK_CHOICES_TOKENS]
            enough = (1 - BLOCK_TOLERANCE) * max(offer.requests_per_s for offer in made)
            return next(offer for offer in made if offer.requests_per_s >= enough)
        return self._aggregated()

    def _prefill(self) -> Offer:
        law = self._prefill_law()
        alone_s, square_s2 = self.mix.prompt_mean(law.time_s), self.mix.prompt_mean(lambda n, c: law.time_s(n, c) ** 2)
        load, ttft_s, limit = 1.0, alone_s, "arithmetic"
        if self.targets.ttft_s is not None:
            loads = np.linspace(0.0, MAX_LOAD, LOAD_STEPS)
            ttfts = alone_s + wait_s(loads, self.replicas, alone_s, square_s2)
            at = int(np.searchsorted(ttfts, self.targets.ttft_s, side="right")) - 1
            load, ttft_s = (float(loads[at]), float(ttfts[at])) if at >= 0 else (0.0, alone_s)
            if load < MAX_LOAD:
                limit = "latency targets"
        rate, wire = self.replicas * load / alone_s, self._wire_rate()
        if rate > wire:
            rate, limit = wire, "network"
        if rate <= 0:
            limit = f"a prompt alone takes {alone_s * 1e3:.0f} ms to its first token"
        return Offer(Role.PREFILL, self.layout.tp, self.replicas, rate, 0, 0.0, ttft_s, limit, self.constants)

    def _decode(self, block_tokens: int) -> Offer:
        batch, step_s, room = self._steps()
        per_batch_s = self.kv_bytes * self._receive_s_per_byte(block_tokens) / self.mix.steps
        itl_s = step_s + batch * per_batch_s
        best, rate, limit = self._most(batch, itl_s, itl_s <= (self.targets.itl_s or math.inf), room)
        rate *= self.replicas
        wire = self._wire_rate()
        if rate > wire:
            rate, limit = wire, "network"
        return Offer(
            Role.DECODE,
            self.layout.tp,
            self.replicas,
            rate,
            best,
            float(itl_s[best - 1]) if best else 0.0,
            0.0,
            limit,
            self._constants_at(best),
            block_tokens,
            rate / self.replicas * self.kv_bytes,
        )

    def _aggregated(self) -> Offer:
        """Every prompt holds up everyone who decodes: ITL = τ / (1 - rate · taken), at most one prompt a step."""
        law = self._prefill_law()
        batch, step_s, room = self._steps()
        alone_s, square_s2 = self.mix.prompt_mean(law.time_s), self.mix.prompt_mean(lambda n, c: law.time_s(n, c) ** 2)
        taken_s = self.constants.interference * alone_s
        itl_s = step_s + np.minimum(batch / self.mix.steps, 1.0) * taken_s
        allowed = itl_s <= (self.targets.itl_s or math.inf)
        allowed &= batch <= self.mix.steps  # beyond, prompts queue and the batch does not fill
        # An engine takes a prompt up some steps after it came, and after those before it.
        ttft_s = alone_s + self.constants.admission_steps * step_s
        if self.targets.ttft_s is not None:
            load = np.minimum(batch / (itl_s * self.mix.steps) * alone_s, 0.999)
            ttft_s = ttft_s + wait_s(load, self.replicas, alone_s, square_s2)
            allowed &= ttft_s <= self.targets.ttft_s
        best, rate, limit = self._most(batch, itl_s, allowed, room)
        at = max(0, best - 1)
        return Offer(
            Role.AGGREGATED,
            self.layout.tp,
            self.replicas,
            self.replicas * rate,
            best,
            float(itl_s[at]),
            float(ttft_s[at]),
            limit,
            self._constants_at(best),
        )

    def _constants_at(self, batch: int) -> Constants:
        """With the uncertainty at that batch, which may be beyond what was measured."""
        return self.node.constants_for(self.layout, float(batch)) if batch else self.constants

    def _steps(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Batch sizes from 1, the step's seconds at each, and how many sequences memory holds."""
        law = self._decode_law()
        fit = memory.fit(self.node.accelerator, self.model, self.layout)
        if self.mix.longest_tokens > fit.kv_tokens:
            raise ConfigInvalid(
                f"a request of {self.mix.longest_tokens} tokens does not fit into the {int(fit.kv_tokens)} tokens of "
                f"KV of {self.layout.tp} x {self.node.accelerator.name}"
            )
        room = fit.max_batch(self.mix.held_tokens)
        batch = np.arange(1, min(max(room, 1), self.max_batch) + 1, dtype=np.float64)
        return batch, np.asarray(law.step_s(batch, batch * self.mix.context_tokens)), room

    def _most(self, batch: np.ndarray, itl_s: np.ndarray, allowed: np.ndarray, room: int) -> tuple[int, float, str]:
        """Batch, requests per second of a replica, and what stands in the way of more."""
        rates = np.where(allowed, batch / (itl_s * self.mix.steps), 0.0)
        at = int(np.argmax(rates))
        if rates[at] <= 0:
            return 0, 0.0, f"a sequence alone takes {itl_s[0] * 1e3:.1f} ms a token, or its first token comes too late"
        best = at + 1
        if best < len(batch):
            limit = "latency targets" if not allowed[at + 1] else "batch beyond its best"
        else:
            limit = "KV memory" if best >= room else "batch limit"
        return best, float(rates[at]), limit

    def _receive_s_per_byte(self, block_tokens: int) -> float:
        """Decode time that one received byte costs: posting its descriptor, and its copies in device memory."""
        ranks = kv.shard(self.model, self.layout)
        descriptor_bytes = block_tokens * kv.layer_bytes_per_token(self.model, self.layout) / ranks
        bandwidth = self.node.accelerator.need("memory_bytes_per_s", "decode")
        return receive_s_per_byte(self.relay, descriptor_bytes, ranks, bandwidth)

    def _wire_rate(self) -> float:
        if self.node.nic_bytes_per_s is None:
            raise ConfigInvalid(
                f"the network rate of {self.node.name!r} is unknown, so no KV may cross to or from it; "
                "give nic_gbit_per_s"
            )
        return self.node.nic_bytes_per_s / self.kv_bytes

    def _prefill_law(self) -> PrefillLaw:
        return prefill_law(self.node.accelerator, self.model, self.layout, self.constants)

    def _decode_law(self) -> DecodeLaw:
        return decode_law(self.node.accelerator, self.model, self.layout, self.constants)


def wait_s(load: np.ndarray, replicas: int, alone_s: float, square_s2: float) -> np.ndarray:
    """Mean wait for one of `replicas` equal servers at that load each (M/G/k, Sakasegawa's approximation)."""
    crowding = load ** (math.sqrt(2 * (replicas + 1)) - 1) / (replicas * (1 - load))
    return np.asarray(crowding * square_s2 / (2 * alone_s))


def receive_s_per_byte(relay: RelaySpec, descriptor_bytes: float, ranks: int, bytes_per_s: float) -> float:
    """Decode time that a received byte costs: post / (bytes per descriptor · ranks) + copies / (ranks · bandwidth)."""
    return relay.post_us * 1e-6 / (descriptor_bytes * ranks) + relay.copies_per_byte / (ranks * bytes_per_s)


def pacing_bytes_per_s(need_bytes_per_s: float, step_s: float, itl_s: float | None, cost_s_per_byte: float) -> float:
    """What a decode replica's lanes may bring it: the mean need with headroom, within `(1 - τ / ITL) / cost`."""
    wanted = need_bytes_per_s * PACING_HEADROOM
    if itl_s is None:
        return wanted
    return max(need_bytes_per_s, min(wanted, max(0.0, 1 - step_s / itl_s) / cost_s_per_byte))


def credit_window_chunks(rate_bytes_per_s: float, relay: RelaySpec, descriptors_per_chunk: int) -> int:
    """Chunks under way so that credit never holds the lane up, ⌈rate · (round trip + drain) / chunk⌉ + 1, within what
    the NIC's queue takes."""
    seconds = (relay.round_trip_us + relay.drain_us) * 1e-6
    wanted = math.ceil(rate_bytes_per_s * seconds / relay.chunk_bytes) + 1
    return max(1, min(wanted, relay.queue_depth // descriptors_per_chunk))
