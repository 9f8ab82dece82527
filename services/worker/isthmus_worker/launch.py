"""A worker process: configuration, engine, relay and the unit's own roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import prometheus_client

from isthmus_kvrelay.client import RelayClient
from isthmus_shared.engines.config import EngineKind
from isthmus_shared.engines.factory import create_engine
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.work import WorkerRef
from isthmus_shared.runtime import ServiceRuntime, run_from_environ
from isthmus_worker.config import WorkerConfig
from isthmus_worker.host import WorkerHost
from isthmus_worker.ports import RelayConnect, RelayLink
from isthmus_worker.roles import RoleHandlers

MakeRole = Callable[[WorkerConfig], RoleHandlers]


def run_worker(name: str, own: Role, roles: Mapping[Role, MakeRole], environ: Mapping[str, str]) -> int:
    """Runs one worker until it is told to stop; returns the process' exit status.

    It begins with its unit's `own` role; of the other `roles` it has those that `ISTHMUS_WORKER_ROLES_ABLE` names.
    """

    async def main(runtime: ServiceRuntime[WorkerConfig]) -> None:
        config = runtime.config
        worker = WorkerRef(worker_id=config.id, incarnation=runtime.incarnation, node_id=config.node_id)
        engine = create_engine(config.engine_config())
        if config.kind is EngineKind.VLLM:
            runtime.metrics.include(prometheus_client.REGISTRY)  # where vLLM keeps its own
        await WorkerHost(
            runtime,
            engine,
            relay_connect(config, worker),
            [roles[own](config)],
            able=[roles[role](config) for role in config.roles_able if role is not own],
            make_engine=lambda model: create_engine(config.engine_for(model)),
        ).run()

    return run_from_environ(name, WorkerConfig, main, environ, instance=lambda config: config.id)


def relay_connect(config: WorkerConfig, worker: WorkerRef) -> RelayConnect | None:
    """How to attach to the node's relay; None when the worker has none."""
    socket_path = config.relay_socket
    if socket_path is None:
        return None

    async def connect() -> RelayLink:
        return await RelayClient.connect(str(socket_path), worker=worker, timeout_s=config.relay_connect_s)

    return connect
