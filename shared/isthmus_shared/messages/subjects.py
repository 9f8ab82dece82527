"""The subjects, in one place. Everything of Isthmus' own begins with `isthmus.v1.`."""

from __future__ import annotations

from isthmus_shared.ids import IngressId, WorkerId

ROOT = "isthmus.v1"

ROUTE = f"{ROOT}.planner.route"
"""RouteRequest → RouteReply; queue group `planner`."""
VIEW = f"{ROOT}.planner.view"
"""ViewRequest → ClusterView; queue group `planner`."""
PLANNER_QUEUE = "planner"
PLAN = f"{ROOT}.planner.plan"
"""RoutePlan, from planners to every ingress."""
EXPLAIN = f"{ROOT}.planner.explain"
"""ExplainRequest → ExplainReply; every planner hears it, and those that know the request answer."""
OUTCOMES = f"{ROOT}.event.outcomes"
"""Outcomes, from ingresses to every planner."""

PREFIX_EVENTS = f"{ROOT}.event.prefix"
"""PrefixEvents, from workers to every planner."""

HEARTBEAT_WORKER = f"{ROOT}.heartbeat.worker"
HEARTBEAT_RELAY = f"{ROOT}.heartbeat.relay"
HEARTBEAT_INGRESS = f"{ROOT}.heartbeat.ingress"
HEARTBEAT_PLANNER = f"{ROOT}.heartbeat.planner"
WORKER_LOST = f"{ROOT}.event.worker_lost"
"""WorkerLost, published by the relay whose client vanished (or by a worker that leaves)."""
MOVE_REQUESTS = f"{ROOT}.event.move_requests"
"""MoveRequests, from a draining worker, the leading planner or an operator to every ingress."""
RELAY_RATES = f"{ROOT}.relay.rates"
"""RelayRates, from the planner to every relay; each takes what is about its own lanes."""

API_CHAT = f"{ROOT}.api.chat.completions"
API_COMPLETIONS = f"{ROOT}.api.completions"
API_MODELS = f"{ROOT}.api.models"
API_QUEUE = "ingress"


def api_cancel(client: str, name: str) -> str:
    """Anything published there ends the request that named it; `client`: the asker's bus user, without its role."""
    return f"{ROOT}.api.cancel.{client}.{name}"


API_CANCEL = api_cancel("*", "*")


def worker_prefill(worker: WorkerId) -> str:
    """SubmitPrefill → SubmitReply."""
    return f"{ROOT}.worker.{worker}.prefill.submit"


def worker_decode(worker: WorkerId) -> str:
    """SubmitDecode → SubmitReply."""
    return f"{ROOT}.worker.{worker}.decode.submit"


def worker_start(worker: WorkerId) -> str:
    """StartDecode → Ack."""
    return f"{ROOT}.worker.{worker}.decode.start"


def worker_save(worker: WorkerId) -> str:
    """SaveSequence → SubmitReply."""
    return f"{ROOT}.worker.{worker}.decode.save"


def worker_release(worker: WorkerId) -> str:
    """Release, from any ingress."""
    return f"{ROOT}.worker.{worker}.release"


def worker_prefixes(worker: WorkerId) -> str:
    """PrefixSnapshotRequest → PrefixSnapshot."""
    return f"{ROOT}.worker.{worker}.prefixes"


def worker_cancel(worker: WorkerId) -> str:
    """Cancel → Ack."""
    return f"{ROOT}.worker.{worker}.cancel"


def ingress_events(ingress: IngressId, incarnation: str) -> str:
    """StepEvents, from every worker that serves one of that ingress' requests."""
    return f"{ROOT}.ingress.{ingress}.{incarnation}.events"


def worker_assign(worker: WorkerId) -> str:
    """AssignRoles → Ack."""
    return f"{ROOT}.worker.{worker}.assign"
