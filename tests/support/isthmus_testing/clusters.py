"""Heartbeats of made-up workers and relays, and a planner's view of them."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus_planner.routing.policy import Policy
from isthmus_planner.routing.refusing import Known
from isthmus_planner.routing.view import View
from isthmus_shared.ids import Incarnation, NodeId, RequestId, WorkerId
from isthmus_shared.messages.health import ProcessState, RelayHeartbeat, Role, WorkerHeartbeat, WorkerLoad
from isthmus_shared.messages.route import RouteRequest, Slo
from isthmus_shared.messages.work import RelayRef

PLANNER = Incarnation("planner-life")
BOTH = (Role.PREFILL, Role.DECODE)


def life(name: str) -> Incarnation:
    return Incarnation(f"life-{name}")


def relay_ref(node: str) -> RelayRef:
    return RelayRef(node_id=NodeId(node), incarnation=Incarnation(f"relay-{node}"), address="127.0.0.1:1")


def worker(
    name: str,
    *roles: Role,
    node: str | None = None,
    relay: bool = True,
    state: ProcessState = ProcessState.READY,
    fingerprint: str = "f",
    form: str = "fp32",
    model: str = "demo",
    vendor: str = "cpu",
    max_len: int = 8192,
    blocks: int = 1000,
    free: int | None = None,
    queued: int = 0,
    running: int = 0,
    waiting: int = 0,
    prefill_rate: float | None = None,
    step_s: float | None = None,
) -> WorkerHeartbeat:
    home = node or f"node-{name}"
    return WorkerHeartbeat(
        incarnation=life(name),
        state=state,
        interval_s=0.5,
        worker_id=WorkerId(name),
        node_id=NodeId(home),
        roles=roles,
        vendor=vendor,
        engine="sim",
        model=model,
        model_fingerprint=fingerprint,
        kv_form=form,
        kv_layout="x",
        max_model_len_tokens=max_len,
        kv_block_tokens=16,
        relay=relay_ref(home) if relay else None,
        load=WorkerLoad(
            running=running,
            waiting=waiting,
            queued_prefill_tokens=queued,
            kv_blocks_total=blocks,
            kv_blocks_free=blocks if free is None else free,
            prefill_tokens_per_s=prefill_rate,
            decode_step_s=step_s,
        ),
    )


def relay(node: str, *, sent: int = 0, received: int = 0, pool_free: int = 1 << 40) -> RelayHeartbeat:
    ref = relay_ref(node)
    return RelayHeartbeat(
        incarnation=ref.incarnation,
        state=ProcessState.READY,
        interval_s=0.5,
        relay=ref,
        pool_bytes=1 << 40,
        pool_free_bytes=pool_free,
        flows_out=0,
        flows_in=0,
        credits_outstanding_bytes=0,
        slots_quarantined=0,
        sent_bytes=sent,
        received_bytes=received,
    )


def view_of(workers: Iterable[WorkerHeartbeat], policy: Policy | None = None) -> View:
    view = View(policy or Policy())
    for beat in workers:
        view.beat(beat, 0.0)
    return view


def known(*models: str, warm: bool = True) -> Known:
    return Known(frozenset(models or ("demo",)), warm)


def ask(
    isl: int = 100,
    *,
    name: str = "r",
    model: str = "demo",
    osl: int = 16,
    exclude: tuple[str, ...] = (),
    ttft_s: float | None = None,
    itl_s: float | None = None,
    waited_s: float = 0.0,
    prefix: tuple[bytes, ...] = (),
) -> RouteRequest:
    slo = None if ttft_s is None and itl_s is None else Slo(ttft_s=ttft_s, itl_s=itl_s)
    return RouteRequest(
        request_id=RequestId(name),
        model=model,
        isl_tokens=isl,
        max_osl_tokens=osl,
        exclude=tuple(life(name) for name in exclude),
        slo=slo,
        waited_s=waited_s,
        prefix=prefix,
    )
