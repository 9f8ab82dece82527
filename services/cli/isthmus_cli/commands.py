"""From a cluster file to the commands of its processes. Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from isthmus_cli.bus_users import INGRESS_ID, RELAY_SECRET, url_file
from isthmus_cli.child import Command
from isthmus_cli.dialling import bus_settings
from isthmus_cli.spec import ClusterSpec, NodeSpec, WorkerSpec
from isthmus_shared.config import FILE_SUFFIX

PASSED_ON = ("ISTHMUS_LOG_LEVEL", "ISTHMUS_LOG_FORMAT", "ISTHMUS_OTLP_ENDPOINT")
"""Settings of the caller's that every process takes over. Others of ours are dropped: the cluster file says them."""
MIB = 1024 * 1024


class Kind(StrEnum):
    NATS = "nats"
    PLANNER = "planner"
    RELAY = "relay"
    WORKER = "worker"
    INGRESS = "ingress"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the file does not say."""

    environ: Mapping[str, str]
    model: Path
    logs: Path
    run_dir: Path
    """Short enough for the sockets in it."""
    secrets: Path
    """Where each process finds its bus URL, and relays their secret (`bus_users`)."""
    port: int
    cpus: int
    own_bus: bool = True
    """Whether the bus is one that was started here; else the caller's settings for it are passed on."""


def commands(spec: ClusterSpec, around: Surroundings) -> list[Command]:
    """In the order of starting; they are stopped in the reverse order."""
    made = [_command(around, spec, "planner", Kind.PLANNER, "isthmus_planner", _planner(spec))]
    for node in spec.nodes:
        if node.relay is not None:
            made.append(
                _command(around, spec, f"relay-{node.id}", Kind.RELAY, "isthmus_kvrelay.daemon", _relay(node, around))
            )
    for node in spec.nodes:
        for worker in node.workers:
            settings = _worker(spec, node, worker, around)
            made.append(_command(around, spec, worker.id, Kind.WORKER, f"isthmus_{worker.role}", settings))
    made.append(_command(around, spec, INGRESS_ID, Kind.INGRESS, "isthmus_ingress", _ingress(spec, around)))
    return made


def _command(
    around: Surroundings, spec: ClusterSpec, name: str, kind: Kind, module: str, settings: Mapping[str, str]
) -> Command:
    inherited = {
        key: value
        for key, value in around.environ.items()
        if (not key.startswith("ISTHMUS_") and key != "NATS_URL") or key in PASSED_ON
    }
    if not around.own_bus:
        inherited |= bus_settings(around.environ)
    url = {"ISTHMUS_NATS_URL_FILE": str(url_file(around.secrets, name))}
    env = _said_once({**inherited, **url, "PYTHONUNBUFFERED": "1", **spec.env, **settings})
    return Command(name, kind.value, (sys.executable, "-m", module), env, around.logs / f"{name}.log")


def _said_once(env: Mapping[str, str]) -> dict[str, str]:
    """Without the file of a setting that the cluster file gives a value."""
    twice = {name + FILE_SUFFIX for name, value in env.items() if value}
    return {name: value for name, value in env.items() if name not in twice}


def _planner(spec: ClusterSpec) -> dict[str, str]:
    return {"ISTHMUS_PLANNER_MODE": spec.planner.mode, **spec.planner.env}


def socket_of(node: NodeSpec, around: Surroundings) -> Path:
    return around.run_dir / f"{node.id}.sock"


def _relay(node: NodeSpec, around: Surroundings) -> dict[str, str]:
    assert node.relay is not None
    return {
        "ISTHMUS_RELAY_NODE_ID": node.id,
        "ISTHMUS_RELAY_SOCKET": str(socket_of(node, around)),
        "ISTHMUS_RELAY_POOL_BYTES": str(node.relay.pool_mib * MIB),
        "ISTHMUS_RELAY_SECRET_FILE": str(around.secrets / RELAY_SECRET),
        **node.relay.env,
    }


def _worker(spec: ClusterSpec, node: NodeSpec, worker: WorkerSpec, around: Surroundings) -> dict[str, str]:
    threads = worker.threads or max(1, around.cpus // len(spec.workers))
    settings = {
        "ISTHMUS_WORKER_ID": worker.id,
        "ISTHMUS_WORKER_NODE_ID": node.id,
        "ISTHMUS_WORKER_VENDOR": worker.vendor,
        "ISTHMUS_ENGINE_KIND": worker.engine or spec.engine,
        "ISTHMUS_ENGINE_MODEL": str(around.model),
        "ISTHMUS_ENGINE_MODEL_NAME": spec.model.name,
        "ISTHMUS_ENGINE_KV_LAYOUT": worker.kv_layout,
        "ISTHMUS_ENGINE_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
    }
    if node.relay is not None:
        settings["ISTHMUS_WORKER_RELAY_SOCKET"] = str(socket_of(node, around))
    optional = {
        "ISTHMUS_ENGINE_KV_BLOCKS": worker.kv_blocks,
        "ISTHMUS_ENGINE_MAX_BATCH": worker.max_batch,
        "ISTHMUS_ENGINE_PREFILL_CHUNK_TOKENS": worker.prefill_chunk_tokens,
        "ISTHMUS_ENGINE_VLLM_ARGS": json.dumps(worker.vllm) if worker.vllm else None,
    }
    settings |= {name: str(value) for name, value in optional.items() if value is not None}
    return settings | worker.env


def _ingress(spec: ClusterSpec, around: Surroundings) -> dict[str, str]:
    return {
        "ISTHMUS_INGRESS_ID": INGRESS_ID,
        "ISTHMUS_INGRESS_HOST": spec.ingress.host,
        "ISTHMUS_INGRESS_PORT": str(around.port),
        "ISTHMUS_INGRESS_MODEL": str(around.model),
        "ISTHMUS_INGRESS_MODEL_NAME": spec.model.name,
        **spec.ingress.env,
    }
