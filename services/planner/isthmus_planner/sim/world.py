"""The whole state of a simulation, as arrays of records that compiled code reads and writes in place.

A link field holds the index of the next record, or NONE. Every time is in simulated seconds since the start.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from isthmus_planner.sim.compiled import constant, sources_fingerprint

Records = Any
"""An array of one of the record types below: `np.recarray`, whose fields are attributes."""

NONE = constant(-1)
ONCE = constant(1)
NEVER = np.inf

PREFILL, DECODE, AGGREGATED = 0, 1, 2
"""A node's role."""
IDLE, COMPUTING_PROMPTS, RUNNING, MIXING = 0, 1, 2, 3
"""What a node does: nothing; prompts alone; a run of decode steps; one step with both."""
CLOSED, POISSON, BURSTY, TRACE = 0, 1, 2, 3
"""A stream's arrivals."""
TTFT, ITL, TPOT, E2EL = constant(0), constant(1), constant(2), constant(3)
"""Rows of the histograms."""
METRICS = 4
DONE, WANTS_TRACE = 0, 1
"""Why the loop came back."""


def _record(**fields: str) -> np.dtype[Any]:
    kinds = {"f": np.float64, "i": np.int64}
    return np.dtype([(name, kinds[kind]) for kind, names in fields.items() for name in names.split()], align=True)


NODE = _record(
    i=(
        "model role next_role drains max_batch a_offset kv_capacity staging_capacity pass_tokens prefill_first "
        "queue_depth cache_blocks cache_base map_base map_mask "
        "doing queue_head queue_tail passing landed_head landed_tail room_head room_tail "
        "running fresh_head kv_used staging_used assigned assigned_kv steps_done lanes_out lanes_in "
        "cache_used cache_newest cache_oldest "
        "kv_peak staging_peak prefilled_requests prefilled_tokens decoded_tokens overflows hit_tokens asked_tokens "
        "steps"
    ),
    f=(
        "receive_pair p_base p_token p_pair p_floor p_extra b c over link kv_bytes stall stall_token share_per_rate "
        "queue_descriptor_bytes queue_retry interference posting_rate "
        "queue_work since assigned_tokens tokens "
        "run_at run_work run_steps run_counted run_stall run_begin speed share step_end "
        "kv_at kv_integral prefill_busy decode_busy batch_integral sent received"
    ),
)
"""`tokens`: resident in running sequences. `run_work`: seconds of steps done since the run began, below 0 while it
stalls; `run_counted`: how many of its steps the histograms have. `speed`: 1 - the share of time that receiving takes.
`posting_rate`: bytes per second that descriptors allow. `queue_work`: seconds of the prompts that wait or are computed;
`since`: when the pass under way began."""

SLOT = _record(
    i="next fresh_next stream number isl osl cached left taken prefill decode finish_step",
    f="sent_at arrived_at started_at first_at granted_at landed_at seated_at predicted",
)
"""A request in the cluster. `left`: new prompt tokens to compute; `taken`: of these, in the pass under way."""

LANE = _record(
    i="head tail slot outstanding",
    f="left begins level level_at wire share",
)
"""From one node to another: a queue of requests, one of which is on its way (`slot`). `outstanding`: descriptors."""

STREAM = _record(
    i=(
        "model kind clients burst limit requests warmup isl_offset isl_count osl_offset osl_count ring_base ring_head "
        "ring_count free spawned made sent arrived in_flight refused completed measured "
        "counted_isl counted_osl counted steady_isl steady_osl steady"
    ),
    f=(
        "rate overhead hit_probability hit_fraction time_scale next_made begun_at last_done last_sent "
        "sum_overhead sum_queue sum_prefill sum_room sum_transfer sum_seat sum_decode"
    ),
)
"""`made`: came into being; `spawned`: of these, those that wait for one of the `free` clients (closed loop);
`measured`: latencies counted; `counted`: completions since `begun_at`, the end of the warm-up; `steady`: of these,
those before the last request was sent."""

SHARED = np.dtype(
    [(name, np.float64) for name in ("setup", "chunk", "burst", "pace", "lane_rate", "window_bytes")]
    + [
        (name, np.int64)
        for name in (
            *("seed", "events", "free_slot", "heap_count", "change_next"),
            *("trace_next", "trace_count", "trace_over", "trace_block_tokens"),
        )
    ]
    + [("sources_" + sources_fingerprint(), np.int64)],
    align=True,
)
"""One record. Its last field's name makes compiled code of other sources unfit (see `compiled`)."""

CHANGE = _record(i="node role", f="at")


class World(NamedTuple):
    shared: Records
    nodes: Records
    slots: Records
    lanes: Records
    """The one from node p to node d is at p · len(nodes) + d."""
    streams: Records
    changes: Records
    """In order of time; a last one at NEVER."""
    a_s: Any
    """float64: the nodes' tables, one after the other."""
    quantiles: Any
    """int64: the streams' length tables."""
    ring: Any
    """float64: when the clients of closed loops become free, one ring for each stream."""
    finish: Any
    """int64 (nodes, most batch): heaps of (step at which a sequence ends)."""
    finish_slot: Any
    by_stream: Any
    """int64 (nodes, streams, 2): running sequences, and those of them that have not made a step yet."""
    heap_at: Any
    """float64: the event queue, in heap order."""
    heap_source: Any
    heap_place: Any
    """int64: where a source is in the heap, or NONE."""
    counts: Any
    """int64 (streams, METRICS, BINS)."""
    sums: Any
    """float64 (streams, METRICS, 2): sum and maximum."""
    trace_at: Any
    """float64: this and the next four are the part of the trace that has been read."""
    trace_isl: Any
    trace_osl: Any
    trace_block_end: Any
    """int64: where a request's block hashes end in `trace_blocks`; they begin where the one before ends."""
    trace_blocks: Any
    cache_hash: Any
    """int64: prefix caches, one after the other: the hash in each entry."""
    cache_older: Any
    """int64: the entry used next before it."""
    cache_newer: Any
    cache_map: Any
    """int64: open addressing, hash to entry + 1."""


def records(kind: np.dtype[Any], count: int) -> Records:
    return np.zeros(count, kind).view(np.recarray)
