"""What a simulated node is: plain numbers, whoever fitted them. Seconds, bytes and tokens throughout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class ScenarioError(ValueError):
    """What was asked cannot be simulated. The message says which field, why, and what to do."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ScenarioError(message)


def require_number(name: str, value: float, *, above: float | None = None, at_least: float | None = None) -> None:
    """NaN fails every bound."""
    if above is not None:
        require(value > above, f"{name} is {value}; give a number above {above:g}")
    if at_least is not None:
        require(value >= at_least, f"{name} is {value}; give a number of at least {at_least:g}")


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


class Interleave(StrEnum):
    """What an aggregated node does with prompts while sequences decode."""

    MIXED = "mixed"
    """A step computes a part of the prompts beside the decode (chunked prefill)."""
    PREFILL_FIRST = "prefill_first"
    """A step computes either; decode waits as long as a prompt does."""


@dataclass(frozen=True, slots=True)
class PrefillTable:
    """Seconds of one pass over prompts with n new tokens, c tokens before them:
    `base + max(floor, token·n + pair·n·(c + n/2)) + extra·n`."""

    base_s: float
    token_s: float
    pair_s: float = 0.0
    """Per (new token, earlier token): attention over the full context."""
    floor_s: float = 0.0
    """Reading the weights once."""
    extra_token_s: float = 0.0
    """Per new token, beside the arithmetic: collectives, host work."""

    def __post_init__(self) -> None:
        for name in ("base_s", "token_s", "pair_s", "floor_s", "extra_token_s"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"PrefillTable.{name} is {value}; give finite seconds >= 0")
        require(self.time_s(1) > 0, "PrefillTable: a prompt takes no time; give base_s, floor_s or token_s")

    def time_s(self, new_tokens: float, cached_tokens: float = 0.0) -> float:
        work = self.token_s * new_tokens + self.pair_s * new_tokens * (cached_tokens + 0.5 * new_tokens)
        return self.base_s + max(self.floor_s, work) + self.extra_token_s * new_tokens


@dataclass(frozen=True, slots=True)
class DecodeTable:
    """Seconds of one step of B sequences that hold K tokens in all: `a_s[B - 1] + b_s_per_token · K`.

    What does not grow with the context (weights, experts touched, sliding windows, sampling) is in `a_s`.
    """

    a_s: tuple[float, ...]
    """For B = 1 to the batch limit, which is its length."""
    b_s_per_token: float

    def __post_init__(self) -> None:
        require(len(self.a_s) > 0, "DecodeTable.a_s is empty; give one figure for every batch size from 1 on")
        for batch, value in enumerate(self.a_s, 1):
            require(
                math.isfinite(value) and value > 0, f"DecodeTable.a_s of batch {batch} is {value}; give seconds > 0"
            )
        value = self.b_s_per_token
        require(math.isfinite(value) and value >= 0, f"DecodeTable.b_s_per_token is {value}; give finite seconds >= 0")

    @property
    def max_batch(self) -> int:
        return len(self.a_s)

    def step_s(self, batch: int, tokens: float) -> float:
        return self.a_s[min(batch, self.max_batch) - 1] + self.b_s_per_token * tokens


@dataclass(frozen=True, slots=True)
class TransferStall:
    """Mechanism `transfer_stall`: a sequence that joins holds every other one up for so long, once."""

    stall_s: float
    stall_s_per_token: float = 0.0

    def __post_init__(self) -> None:
        require_number("TransferStall.stall_s", self.stall_s, at_least=0)
        require_number("TransferStall.stall_s_per_token", self.stall_s_per_token, at_least=0)


@dataclass(frozen=True, slots=True)
class DescriptorPosting:
    """Mechanism `descriptor_posting`: receiving at r bytes per second takes the share
    `r · (post_s / (bytes_per_descriptor · ranks) + copy_s_per_byte)` of the decode steps' time."""

    post_s: float
    bytes_per_descriptor: float
    ranks: int = 1
    copy_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        require_number("DescriptorPosting.post_s", self.post_s, at_least=0)
        require_number("DescriptorPosting.bytes_per_descriptor", self.bytes_per_descriptor, above=0)
        require_number("DescriptorPosting.ranks", self.ranks, at_least=1)
        require_number("DescriptorPosting.copy_s_per_byte", self.copy_s_per_byte, at_least=0)

    @property
    def share_per_byte_per_s(self) -> float:
        return self.post_s / (self.bytes_per_descriptor * self.ranks) + self.copy_s_per_byte


@dataclass(frozen=True, slots=True)
class ResidentKv:
    """Mechanism `resident_kv`: each step takes so much longer per resident token above a number of them, and so may
    taking in a prompt."""

    s_per_token: float
    above_tokens: float = 0.0
    receive_s_per_pair: float = 0.0
    """Of a lane, before a flow: per token that comes and token of room held here above the same number, those that
    wait for their KV included."""

    def __post_init__(self) -> None:
        require_number("ResidentKv.s_per_token", self.s_per_token, at_least=0)
        require_number("ResidentKv.above_tokens", self.above_tokens, at_least=0)
        require_number("ResidentKv.receive_s_per_pair", self.receive_s_per_pair, at_least=0)


@dataclass(frozen=True, slots=True)
class NicQueue:
    """Mechanism `nic_queue_overflow`: a transfer that would put more descriptors under way to this node than its
    NIC can hold is refused by it and tried again after `retry_s`."""

    depth: int
    retry_s: float
    bytes_per_descriptor: float

    def __post_init__(self) -> None:
        require_number("NicQueue.depth", self.depth, at_least=1)
        require_number("NicQueue.retry_s", self.retry_s, above=0)
        require_number("NicQueue.bytes_per_descriptor", self.bytes_per_descriptor, above=0)


@dataclass(frozen=True, slots=True)
class Node:
    """One engine: an accelerator, or several joined by tensor parallelism."""

    name: str
    role: Role
    kv_capacity_tokens: int
    """A sequence holds prompt and output from its admission to its end, so that none is ever pushed out."""
    prefill: PrefillTable | None = None
    decode: DecodeTable | None = None
    model: str = ""
    pass_tokens: int = 8192
    """New tokens that one prefill pass, or one mixed step, computes at most; a longer prompt takes several."""
    interleave: Interleave = Interleave.MIXED
    kv_bytes_per_token: float = 0.0
    """On the wire."""
    link_bytes_per_s: float = math.inf
    """Of its NICs together, in each direction."""
    staging_tokens: int | None = None
    """KV that a prefill node's host memory holds until decode has it; None: no limit."""
    prefix_cache_blocks: int = 0
    """For traces with block hashes, least recently used first out. 0: no cache."""
    transfer_stall: TransferStall | None = None
    descriptor_posting: DescriptorPosting | None = None
    resident_kv: ResidentKv | None = None
    nic_queue: NicQueue | None = None
    interference: float = 0.0
    """Mechanism `aggregated_interference`: a prefill pass beside running sequences takes (1 + this) times as long.
    Below 0 the two overlap, since one wants arithmetic and the other memory."""

    def __post_init__(self) -> None:
        here = f"node {self.name!r}"
        require(bool(self.name), "a node has no name; give each its own")
        require_number(f"{here}: kv_capacity_tokens", self.kv_capacity_tokens, at_least=1)
        require_number(f"{here}: pass_tokens", self.pass_tokens, at_least=1)
        require_number(f"{here}: kv_bytes_per_token", self.kv_bytes_per_token, at_least=0)
        require(math.isfinite(self.kv_bytes_per_token), f"{here}: kv_bytes_per_token is infinite; give bytes")
        require_number(f"{here}: link_bytes_per_s", self.link_bytes_per_s, above=0)
        require_number(f"{here}: interference", self.interference, above=-1)
        require_number(f"{here}: prefix_cache_blocks", self.prefix_cache_blocks, at_least=0)
        if self.staging_tokens is not None:
            require_number(f"{here}: staging_tokens", self.staging_tokens, at_least=1)
        self.require_able(self.role)

    def require_able(self, role: Role) -> None:
        here = f"node {self.name!r} in the role {role.value!r}"
        require(role is Role.DECODE or self.prefill is not None, f"{here} has no prefill law; give `prefill`")
        require(role is Role.PREFILL or self.decode is not None, f"{here} has no decode law; give `decode`")


@dataclass(frozen=True, slots=True)
class Relay:
    """How KV crosses: setup + chunks under credit and pace. The pacer's rule is `isthmus_kvrelay.core.pacer`'s."""

    setup_s: float = 0.0
    """Before the first chunk may leave: grants, hand-over. The lane does nothing else meanwhile."""
    chunk_bytes: int = 1 << 20
    burst_chunks: int = 4
    pace_bytes_per_s: float = math.inf
    """Of one lane (one sending, one receiving node)."""
    work_requests: int | None = 256
    """Chunks under way on one lane; None: no limit."""
    credit_round_trip_s: float = 0.0
    """From a grant until the chunk has landed and the next may be granted, beside its time on the wire."""
    host_bytes_per_s: float = math.inf
    """What one lane's host threads move."""

    def __post_init__(self) -> None:
        require_number("Relay.setup_s", self.setup_s, at_least=0)
        require_number("Relay.chunk_bytes", self.chunk_bytes, at_least=1)
        require_number("Relay.burst_chunks", self.burst_chunks, at_least=1)
        require_number("Relay.pace_bytes_per_s", self.pace_bytes_per_s, above=0)
        require_number("Relay.credit_round_trip_s", self.credit_round_trip_s, at_least=0)
        require_number("Relay.host_bytes_per_s", self.host_bytes_per_s, above=0)
        if self.work_requests is not None:
            require_number("Relay.work_requests", self.work_requests, at_least=1)

    @property
    def lane_bytes_per_s(self) -> float:
        """What one lane can carry beside its pace: its host threads, and a window of credit per round trip."""
        if self.work_requests is None or self.credit_round_trip_s == 0:
            return self.host_bytes_per_s
        return min(self.host_bytes_per_s, self.work_requests * self.chunk_bytes / self.credit_round_trip_s)
