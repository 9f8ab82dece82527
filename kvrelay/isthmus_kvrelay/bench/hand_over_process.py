"""One end of a hand-over within a node, see `bench.hand_over`."""

from __future__ import annotations

import argparse
import asyncio
import time

import uvloop

from isthmus_kvrelay.bench.children import Message, serve
from isthmus_kvrelay.bench.driver_process import DEADLINE_S, G1, connect, manifest_of
from isthmus_kvrelay.client import RelayClient
from isthmus_shared.engines.kv_port import KvSink
from isthmus_shared.ids import TransferId, new_id
from isthmus_shared.messages.work import KvTicket

LAST_BLOCK_BYTES = 64 << 10
SETTLE_S = 0.01
"""For everybody to have heard of the source that was opened and of what is filled; nothing answers that."""


class End:
    def __init__(self, client: RelayClient) -> None:
        self._client = client
        self._sink: KvSink | None = None

    async def answer(self, message: Message) -> Message:
        match message["do"]:
            case "reserve":
                return await self._reserve(message["total_bytes"])
            case "finish":
                return await self._finish()
            case _:
                return await self._take(KvTicket.model_validate(message["ticket"]))

    async def _reserve(self, total_bytes: int) -> Message:
        """All but the last block is declared filled before, as layer by layer it is."""
        transfer, manifest = TransferId(new_id("xfer")), manifest_of(total_bytes)
        self._sink = await self._client.open_sink(transfer, G1, manifest, deadline_s=DEADLINE_S, wait_s=DEADLINE_S)
        self._sink.filled(0, total_bytes - min(total_bytes, LAST_BLOCK_BYTES))
        ticket = KvTicket(transfer_id=transfer, generation=G1, source=self._client.relay, manifest=manifest)
        return ticket.model_dump(mode="json")

    async def _finish(self) -> Message:
        sink = self._sink
        assert sink is not None
        await asyncio.sleep(SETTLE_S)
        last = min(sink.total_bytes, LAST_BLOCK_BYTES)
        began_s = time.perf_counter()
        sink.filled(sink.total_bytes - last, last)
        sink.seal()
        return {"at_s": began_s}

    async def _take(self, ticket: KvTicket) -> Message:
        source = await self._client.open_source(ticket, deadline_s=DEADLINE_S)
        await source.ready()
        ready_s = time.perf_counter()
        source.release()
        return {"at_s": ready_s}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--role", required=True)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        client = runner.run(connect(arguments.socket, arguments.role))
        end = End(client)
        serve(arguments.fd, lambda message: runner.run(end.answer(message)), first={})
        runner.run(client.close())


if __name__ == "__main__":
    main()
