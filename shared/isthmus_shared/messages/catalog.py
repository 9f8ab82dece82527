"""Every subject with its messages and parties, as data: `tools/gen_schemas.py` writes `schemas/` from it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MappingProxyType

import isthmus_shared.messages as package
from isthmus_shared.ids import IngressId, WorkerId
from isthmus_shared.messages import assign, health, outcomes, prefix, route, subjects, work
from isthmus_shared.messages.base import WireMessage


@dataclass(frozen=True, slots=True)
class Channel:
    """One subject. `address` has its variable tokens in braces; `message` is None where OpenAI's bodies travel."""

    name: str
    address: str
    message: type[WireMessage] | None
    publishers: tuple[str, ...]
    listeners: tuple[str, ...]
    text: str
    reply: type[WireMessage] | None = None
    queue: str | None = None
    parameters: MappingProxyType[str, str] = field(default_factory=lambda: MappingProxyType({}))


_WORKER = MappingProxyType({"worker": "The worker's id"})
_INGRESS = MappingProxyType(
    {"ingress": "The ingress' id", "incarnation": "Its life, so that a restart hears nothing old"}
)
_CANCEL = MappingProxyType({"client": "Who asked", "name": "What the asker calls it"})
_worker_id = WorkerId("{worker}")

CHANNELS: tuple[Channel, ...] = (
    Channel(
        "route",
        subjects.ROUTE,
        route.RouteRequest,
        ("ingress",),
        ("planner",),
        "Where one request goes",
        reply=route.RouteReply,
        queue=subjects.PLANNER_QUEUE,
    ),
    Channel(
        "view",
        subjects.VIEW,
        health.ViewRequest,
        ("ingress", "isthmus status"),
        ("planner",),
        "What the planner knows of the cluster",
        reply=health.ClusterView,
        queue=subjects.PLANNER_QUEUE,
    ),
    Channel(
        "plan",
        subjects.PLAN,
        route.RoutePlan,
        ("planner",),
        ("ingress", "isthmus status"),
        "What an ingress routes by while no planner answers",
    ),
    Channel(
        "explain",
        subjects.EXPLAIN,
        outcomes.ExplainRequest,
        ("isthmus explain",),
        ("planner",),
        "Why one request went where it went; planners that know it answer",
        reply=outcomes.ExplainReply,
    ),
    Channel(
        "outcomes",
        subjects.OUTCOMES,
        outcomes.Outcomes,
        ("ingress",),
        ("planner",),
        "What became of the requests that have ended",
    ),
    Channel(
        "assign",
        subjects.worker_assign(_worker_id),
        assign.AssignRoles,
        ("planner",),
        ("prefill-worker", "decode-worker"),
        "Which roles and which model the leading planner wants the worker to have",
        reply=work.Ack,
        parameters=_WORKER,
    ),
    Channel(
        "prefix_events",
        subjects.PREFIX_EVENTS,
        prefix.PrefixEvents,
        ("prefill-worker", "decode-worker"),
        ("planner",),
        "What workers have stored in their prefix caches and removed from them",
    ),
    Channel(
        "prefix_snapshot",
        subjects.worker_prefixes(_worker_id),
        prefix.PrefixSnapshotRequest,
        ("planner",),
        ("prefill-worker", "decode-worker"),
        "All that a worker has in its prefix cache, for a planner that has missed an event",
        reply=prefix.PrefixSnapshot,
        parameters=_WORKER,
    ),
    Channel(
        "prefill_submit",
        subjects.worker_prefill(_worker_id),
        work.SubmitPrefill,
        ("ingress",),
        ("prefill-worker",),
        "Compute a prompt's KV and first token; the answer's ticket says where the KV will be",
        reply=work.SubmitReply,
        parameters=_WORKER,
    ),
    Channel(
        "decode_submit",
        subjects.worker_decode(_worker_id),
        work.SubmitDecode,
        ("ingress",),
        ("decode-worker",),
        "Fetch a ticket's KV and wait for the start; without a ticket, serve the whole request",
        reply=work.SubmitReply,
        parameters=_WORKER,
    ),
    Channel(
        "decode_start",
        subjects.worker_start(_worker_id),
        work.StartDecode,
        ("ingress",),
        ("decode-worker",),
        "The first token, from prefill: decode begins once the KV is there too",
        reply=work.Ack,
        parameters=_WORKER,
    ),
    Channel(
        "save",
        subjects.worker_save(_worker_id),
        work.SaveSequence,
        ("ingress",),
        ("decode-worker",),
        "Pause a running sequence and stage its KV, for another decode worker to go on with",
        reply=work.SubmitReply,
        parameters=_WORKER,
    ),
    Channel(
        "release",
        subjects.worker_release(_worker_id),
        work.Release,
        ("ingress",),
        ("prefill-worker", "decode-worker"),
        "Requests that are over: what is retained for them may go",
        parameters=_WORKER,
    ),
    Channel(
        "move_requests",
        subjects.MOVE_REQUESTS,
        work.MoveRequests,
        ("decode-worker", "planner", "operator"),
        ("ingress",),
        "Move what runs on that worker elsewhere",
    ),
    Channel(
        "cancel",
        subjects.worker_cancel(_worker_id),
        work.Cancel,
        ("ingress",),
        ("prefill-worker", "decode-worker"),
        "End whatever the worker holds for a request; always acknowledged",
        reply=work.Ack,
        parameters=_WORKER,
    ),
    Channel(
        "events",
        subjects.ingress_events(IngressId("{ingress}"), "{incarnation}"),
        work.StepEvents,
        ("prefill-worker", "decode-worker"),
        ("ingress",),
        "Tokens: one message per engine step and ingress",
        parameters=_INGRESS,
    ),
    Channel(
        "heartbeat_worker",
        subjects.HEARTBEAT_WORKER,
        health.WorkerHeartbeat,
        ("prefill-worker", "decode-worker"),
        ("planner", "ingress"),
        "A worker's life, roles, form of KV and load",
    ),
    Channel(
        "heartbeat_relay",
        subjects.HEARTBEAT_RELAY,
        health.RelayHeartbeat,
        ("kvrelay",),
        ("planner",),
        "A relay's life, pool, flows and credits",
    ),
    Channel(
        "heartbeat_ingress",
        subjects.HEARTBEAT_INGRESS,
        health.IngressHeartbeat,
        ("ingress",),
        ("planner", "prefill-worker", "decode-worker"),
        "An ingress' life; when it ends, workers abort its requests",
    ),
    Channel(
        "heartbeat_planner",
        subjects.HEARTBEAT_PLANNER,
        health.PlannerHeartbeat,
        ("planner",),
        ("ingress", "planner"),
        "A planner's life",
    ),
    Channel(
        "worker_lost",
        subjects.WORKER_LOST,
        health.WorkerLost,
        ("kvrelay", "prefill-worker", "decode-worker", "planner"),
        ("planner", "ingress"),
        "A worker is gone: its relay saw the socket close, or it said goodbye",
    ),
    Channel(
        "relay_rates",
        subjects.RELAY_RATES,
        health.RelayRates,
        ("planner",),
        ("kvrelay", "planner"),
        "How fast relays may send to each other",
    ),
    Channel(
        "api_chat",
        subjects.API_CHAT,
        None,
        ("client",),
        ("ingress",),
        "An OpenAI chat completion request in JSON or msgpack; answers come to the reply inbox",
        queue=subjects.API_QUEUE,
    ),
    Channel(
        "api_completions",
        subjects.API_COMPLETIONS,
        None,
        ("client",),
        ("ingress",),
        "An OpenAI completion request in JSON or msgpack; answers come to the reply inbox",
        queue=subjects.API_QUEUE,
    ),
    Channel(
        "api_cancel",
        subjects.api_cancel("{client}", "{name}"),
        None,
        ("client",),
        ("ingress",),
        "Ends the request whose header `isthmus-cancel` named this subject; whatever is published",
        parameters=_CANCEL,
    ),
    Channel(
        "api_models",
        subjects.API_MODELS,
        None,
        ("client",),
        ("ingress",),
        "The list of models, as GET /v1/models",
        queue=subjects.API_QUEUE,
    ),
)


def all_messages() -> dict[str, type[WireMessage]]:
    """Every message type of the package by kind, in order of kind. `AssertionError` if two share a kind."""
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    found: dict[str, type[WireMessage]] = {}
    for message in _descendants(WireMessage):
        if message.KIND and message.__module__.startswith(f"{package.__name__}."):
            assert message.KIND not in found, f"{message.__name__} and {found[message.KIND].__name__} share a kind"
            found[message.KIND] = message
    return dict(sorted(found.items()))


def _descendants(message: type[WireMessage]) -> Iterator[type[WireMessage]]:
    for child in message.__subclasses__():
        yield child
        yield from _descendants(child)
