"""``python -m isthmus_testing.relay_client_process SOCKET TRANSFER BYTES FILLED``

A producer under uvloop, to be killed.
Opens a sink, fills its first bytes, seals when that is all of them, prints ``ready`` and waits for its end.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from isthmus_kvrelay.client import RelayClient
from isthmus_shared.ids import Generation, Incarnation, NodeId, TransferId, WorkerId
from isthmus_shared.messages.work import WorkerRef
from isthmus_testing.relay import manifest_of, pattern, write


async def produce(socket_path: str, transfer_id: str, total_bytes: int, filled_bytes: int) -> None:
    worker = WorkerRef(worker_id=WorkerId("doomed"), incarnation=Incarnation("only"), node_id=NodeId("a"))
    client = await RelayClient.connect(socket_path, worker=worker, timeout_s=10)
    sink = await client.open_sink(
        TransferId(transfer_id), Generation(1), manifest_of(total_bytes), deadline_s=120, wait_s=1
    )
    await asyncio.to_thread(write, sink, pattern(total_bytes)[:filled_bytes])
    if filled_bytes == total_bytes:
        sink.seal()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await client.lost.wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(produce(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
