"""A relay of its own, without a bus: ``python -m isthmus_kvrelay.bench.relay_process --fd N --node a --socket PATH``.

Settings are the relay's own `ISTHMUS_RELAY_*`. Its first answer is its `RelayRef`; it ends when the parent closes.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import os
import socket

import structlog
import uvloop

from isthmus_kvrelay.core.events import FlowClosed
from isthmus_kvrelay.daemon.config import RelayConfig
from isthmus_kvrelay.daemon.relay_daemon import DaemonSettings, RelayDaemon
from isthmus_shared.ids import new_incarnation
from isthmus_shared.messages.work import WorkerRef


async def run(settings: DaemonSettings, fd: int) -> None:
    daemon = RelayDaemon(settings, log=structlog.get_logger(), on_client_lost=_client_lost, on_flow_closed=_flow_closed)
    await daemon.start()
    gc.collect()
    gc.freeze()  # as `daemon.service` does
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    try:
        writer.write(daemon.ref.model_dump_json().encode() + b"\n")
        while await reader.readline():
            stats = daemon.stats()
            answer = {"sent_bytes": stats.sent_bytes, "received_bytes": stats.received_bytes, "stale": stats.stale}
            answer["settled"] = daemon.settled
            writer.write(json.dumps(answer).encode() + b"\n")
    finally:
        writer.close()
        await daemon.stop()


def _client_lost(worker: WorkerRef, why: str) -> None:
    return


def _flow_closed(closed: FlowClosed) -> None:
    return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--no-checksums", action="store_true")
    parser.add_argument("--core", default="{}", help="fields of the core's settings over the environment's, as JSON")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    settings = RelayConfig.load(os.environ).settings(new_incarnation())
    core = dataclasses.replace(settings.relay, **json.loads(arguments.core))
    settings = dataclasses.replace(settings, relay=core)
    if arguments.no_checksums:
        tcp = dataclasses.replace(settings.transport.tcp, checksums=False)
        settings = dataclasses.replace(settings, transport=dataclasses.replace(settings.transport, tcp=tcp))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(settings, arguments.fd))


if __name__ == "__main__":
    main()
