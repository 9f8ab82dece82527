"""Routes, tickets and tokens for tests of the saga."""

from __future__ import annotations

from isthmus_shared.ids import Generation, Incarnation, NodeId, TransferId, WorkerId
from isthmus_shared.kv.manifest import GroupKind, KvDtype, KvGroup, KvManifest
from isthmus_shared.messages.route import Deadlines, Mode, Prediction, Route
from isthmus_shared.messages.work import KvTicket, RelayRef, WorkerRef

LIMITS = Deadlines(ttft_s=5, transfer_s=8, stall_s=2)
_PREDICTED = Prediction(ttft_p50_s=0, ttft_p90_s=0, itl_p50_s=0, itl_p90_s=0, calibrated=False)
_GROUP = KvGroup(kind=GroupKind.FULL, layer_ids=(0,), kv_heads=1, head_dim=8, token_start=0, token_end=4)
TICKET = KvTicket(
    transfer_id=TransferId("t"),
    generation=Generation(1),
    source=RelayRef(node_id=NodeId("n"), incarnation=Incarnation("relay"), address="127.0.0.1:1"),
    manifest=KvManifest(model_fingerprint="m", dtype=KvDtype.FP32, prompt_tokens=4, groups=(_GROUP,)),
)


def token_at(index: int) -> int:
    """The one right token at an output index."""
    return 1000 + index


def worker(name: str) -> WorkerRef:
    return WorkerRef(worker_id=WorkerId(name), incarnation=Incarnation(f"life-{name}"), node_id=NodeId(f"node-{name}"))


def staged_route(life: int) -> Route:
    """Over `d<life>`, which is to fetch what is staged."""
    return make_route(life).model_copy(update={"prefill": None})


def make_route(life: int, *, aggregated: bool = False, limits: Deadlines = LIMITS) -> Route:
    """A route over workers of that life, `p<life>` and `d<life>`."""
    return Route(
        mode=Mode.AGGREGATED if aggregated else Mode.DISAGGREGATED,
        prefill=None if aggregated else worker(f"p{life}"),
        decode=worker(f"d{life}"),
        deadlines=limits,
        predicted=_PREDICTED,
        planner=Incarnation("planner"),
    )
