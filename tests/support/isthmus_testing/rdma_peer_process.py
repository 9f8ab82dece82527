"""A relay with lanes over verbs as a process of its own, to be stopped or killed.

python -m isthmus_testing.rdma_peer_process BINDING DEVICE FOLDER BYTES FILLED

It offers one transfer of BYTES of which FILLED are filled, prints one line of JSON (its `RelayRef` and the transfer's
name), and lives until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from pathlib import Path

from isthmus_kvrelay.transports.verbs.binding import load_binding
from isthmus_kvrelay.transports.verbs.transport import VerbsSettings
from isthmus_testing.relay import G1, client_of, daemon_settings, manifest_of, new_transfer, pattern, running, write


async def main(binding: str, device: str, folder: str, total_bytes: int, filled_bytes: int) -> None:
    settings = daemon_settings(
        Path(folder), "peer", verbs=VerbsSettings(devices=(device,)), load=partial(load_binding, (binding,))
    )
    async with running(settings) as node, client_of(node) as producer:
        transfer = new_transfer()
        sink = await producer.open_sink(transfer, G1, manifest_of(total_bytes), deadline_s=120, wait_s=1)
        write(sink, pattern(total_bytes)[:filled_bytes])
        told = {"ref": node.ref.model_dump(mode="json"), "transfer": transfer}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
