"""Workers of a made-up cluster: half prefill, half decode, all of one model, each loaded differently."""

from __future__ import annotations

import random

from isthmus_shared.ids import Incarnation, NodeId, RequestId, WorkerId
from isthmus_shared.messages.health import ProcessState, RelayHeartbeat, Role, StepSample, WorkerHeartbeat, WorkerLoad
from isthmus_shared.messages.route import RouteRequest, Slo
from isthmus_shared.messages.work import RelayRef

MODEL = "bench"
FORM = "bf16/f/full[0,1,2,3]h8d128"
BLOCKS = 100_000


def relay_ref(index: int) -> RelayRef:
    return RelayRef(node_id=NodeId(f"n{index:05}"), incarnation=Incarnation(f"relay-{index}"), address="127.0.0.1:1")


def worker(index: int, rng: random.Random, steps_total: int) -> WorkerHeartbeat:
    role = (Role.PREFILL, Role.DECODE)[index % 2]
    prefills = role is Role.PREFILL
    running = rng.randrange(64)
    used = rng.randrange(BLOCKS // 2)
    step_s = 0.005 + 2e-5 * running + 1e-9 * used * 16
    sample = StepSample(
        step_s=step_s + (0.1 if prefills else 0.0),
        decode_sequences=0 if prefills else max(1, running),
        prefill_tokens=8192 if prefills else 0,
        kv_tokens=used * 16,
    )
    return WorkerHeartbeat(
        incarnation=Incarnation(f"life-{index:05}"),
        state=ProcessState.READY,
        interval_s=60.0,
        worker_id=WorkerId(f"w{index:05}"),
        node_id=NodeId(f"n{index:05}"),
        roles=(role,),
        vendor="cpu",
        engine="sim",
        model=MODEL,
        model_fingerprint="f",
        kv_form=FORM,
        kv_layout="x",
        max_model_len_tokens=131_072,
        kv_block_tokens=16,
        relay=relay_ref(index),
        load=WorkerLoad(
            running=running,
            queued_prefill_tokens=rng.randrange(40_000) if prefills else 0,
            kv_blocks_total=BLOCKS,
            kv_blocks_free=BLOCKS - used,
            steps_total=steps_total,
            steps=(sample,) * 8,
        ),
    )


def relay(index: int, moved_bytes: int) -> RelayHeartbeat:
    ref = relay_ref(index)
    return RelayHeartbeat(
        incarnation=ref.incarnation,
        state=ProcessState.READY,
        interval_s=60.0,
        relay=ref,
        pool_bytes=1 << 36,
        pool_free_bytes=1 << 35,
        flows_out=0,
        flows_in=0,
        credits_outstanding_bytes=0,
        slots_quarantined=0,
        sent_bytes=moved_bytes,
        received_bytes=moved_bytes,
    )


def request(number: int, rng: random.Random, *, targets: bool) -> RouteRequest:
    return RouteRequest(
        request_id=RequestId(f"req-{number}~abcdefgh"),
        model=MODEL,
        isl_tokens=rng.randrange(100, 16_000),
        max_osl_tokens=256,
        slo=Slo(ttft_s=2.0, itl_s=0.02) if targets else None,
        tenant="anyone",
    )
