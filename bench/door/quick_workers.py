"""A prefill and a decode worker that compute nothing, in one process, and speak the bus' real messages.

    python -m door.quick_workers --nats URL --model NAME [--step-ms 0] [--tokens 300 1000]

What a real worker says is said here too, in the same form and the same number of messages: heartbeats with a relay,
a ticket for each prefill, one StepEvents message per step and ingress. No KV exists and nothing crosses. It stands
for an engine that is never the bottleneck, as NVIDIA Dynamo's mocker does on its side of the comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import uvloop

from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.ids import Incarnation, NodeId, WorkerId, new_incarnation
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import ProcessState, Role, WorkerHeartbeat, WorkerLoad
from isthmus_shared.messages.work import RelayRef

BEAT_S = 0.5
KV_BLOCKS, BLOCK_TOKENS = 1_000_000, 16
MAX_LEN_TOKENS = 32_768

Fields = dict[str, Any]
Handler = Callable[[Fields], Fields | None]


@dataclass(slots=True)
class Sequence:
    event: Fields
    """Sent anew each step with the next index and token."""
    subject: str
    end: int


class QuickWorker:
    """One role. `steps` runs while there are sequences: each step gives every one of them one token."""

    def __init__(self, bus: NatsBus, name: str, role: Role, model: str, step_s: float, tokens: range) -> None:
        self._bus, self.role, self._model, self._step_s, self._tokens = bus, role, model, step_s, tokens
        self.incarnation, self.id = new_incarnation(), WorkerId(name)
        self.node = NodeId(f"node-{name}")
        self._ref = {"worker_id": self.id, "incarnation": self.incarnation, "node_id": self.node}
        self.relay = RelayRef(node_id=self.node, incarnation=Incarnation(f"relay-{name}"), address="127.0.0.1:9")
        self._running: dict[str, Sequence] = {}
        self._waiting: dict[str, tuple[Fields, int]] = {}
        """Decode, before its first token came: the submit and its length."""
        self._work = asyncio.Event()
        self._steps = 0

    # -- what the ingress asks --------------------------------------------------------------------------------------

    def submit_prefill(self, message: Fields) -> Fields:
        offset = message["output_offset"]
        finish = "length" if offset + 1 >= message["sampling"]["max_tokens"] else "handoff"
        self._begin(message, offset, offset + 1, finish)
        tokens = len(message["token_ids"])
        group = {"kind": "full", "layer_ids": [0], "kv_heads": 1, "head_dim": 8, "token_start": 0, "token_end": tokens}
        manifest = {
            "version": 1,
            "model_fingerprint": "none",
            "dtype": "bf16",
            "prompt_tokens": tokens,
            "groups": [{**group, "head_start": 0}],
        }
        ticket = {
            "transfer_id": message["transfer_id"],
            "generation": message["generation"],
            "source": self.relay.model_dump(),
            "manifest": manifest,
            "pull": 1,
        }
        return {"kind": "submit_reply", "v": 1, "ticket": ticket}

    def submit_decode(self, message: Fields) -> Fields:
        if message.get("ticket") is None:
            self._begin(message, message["output_offset"], message["sampling"]["max_tokens"], "length")
        else:
            self._waiting[message["request_id"]] = (message, message["output_offset"] + 1)
        return {"kind": "submit_reply", "v": 1}

    def start_decode(self, message: Fields) -> Fields:
        waiting = self._waiting.pop(message["request_id"], None)
        if waiting is not None:
            submit, index = waiting
            self._begin(submit, index, submit["sampling"]["max_tokens"], "length")
        return {"kind": "ack", "v": 1}

    def cancel(self, message: Fields) -> Fields:
        """Of that generation and older ones."""
        request_id, generation = message["request_id"], message["generation"]
        running, waiting = self._running.get(request_id), self._waiting.get(request_id)
        if running is not None and running.event["generation"] <= generation:
            del self._running[request_id]
        if waiting is not None and waiting[0]["generation"] <= generation:
            del self._waiting[request_id]
        return {"kind": "ack", "v": 1}

    def _begin(self, message: Fields, index: int, end: int, finish: str) -> None:
        event = {
            "request_id": message["request_id"],
            "generation": message["generation"],
            "output_index": index,
            "token_ids": [0],
            "cached_tokens": 0,
        }
        if index < end:
            self._running[message["request_id"]] = Sequence({**event, "finish": finish}, message["events_subject"], end)
            self._work.set()

    # -- what it says -----------------------------------------------------------------------------------------------

    async def steps(self) -> None:
        loop = asyncio.get_running_loop()
        started_s = next_s = loop.time()
        while True:
            await self._work.wait()
            next_s = max(loop.time(), next_s + self._step_s)
            await asyncio.sleep(max(0.0, next_s - loop.time()))
            facts = {
                "number": self._steps,
                "ended_s": loop.time() - started_s,
                "step_s": self._step_s,
                "decode_sequences": len(self._running),
                "prefill_tokens": 0,
                "kv_loads": 0,
            }
            self._steps += 1
            for subject, events in self._step().items():
                said = {"kind": "step_events", "v": 1, "worker": self._ref, "events": events, "step": facts}
                await self._bus.publish(subject, msgpack.packb(said))
            if not self._running:
                self._work.clear()

    def _step(self) -> dict[str, list[Fields]]:
        by_subject: dict[str, list[Fields]] = {}
        ended = []
        for request_id, sequence in self._running.items():
            event = dict(sequence.event)
            index = event["output_index"]
            event["token_ids"] = [self._tokens[index * 7919 % len(self._tokens)]]
            sequence.event["output_index"] = index + 1
            if index + 1 >= sequence.end:
                ended.append(request_id)
            else:
                del event["finish"]
            by_subject.setdefault(sequence.subject, []).append(event)
        for request_id in ended:
            del self._running[request_id]
        return by_subject

    def heartbeat(self) -> WorkerHeartbeat:
        return WorkerHeartbeat(
            incarnation=self.incarnation,
            state=ProcessState.READY,
            interval_s=BEAT_S,
            worker_id=self.id,
            node_id=self.node,
            roles=(self.role,),
            vendor="none",
            engine="none",
            model=self._model,
            model_fingerprint="none",
            kv_form="bf16",
            kv_layout="none",
            max_model_len_tokens=MAX_LEN_TOKENS,
            kv_block_tokens=BLOCK_TOKENS,
            relay=self.relay,
            load=WorkerLoad(running=len(self._running), kv_blocks_total=KV_BLOCKS, kv_blocks_free=KV_BLOCKS),
        )

    async def beat(self) -> None:
        while True:
            await self._bus.publish(subjects.HEARTBEAT_WORKER, self.heartbeat().encode())
            await asyncio.sleep(BEAT_S)

    async def serve(self, subject: str, handler: Handler) -> None:
        async with self._bus.subscribe(subject, max_pending=65_536) as requests:
            async for message in requests:
                reply = handler(msgpack.unpackb(message.data))
                if reply is not None and message.reply is not None:
                    await self._bus.publish(message.reply, msgpack.packb(reply))


async def run(nats: str, model: str, step_s: float, tokens: range) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with await NatsBus.connect(nats, name="quick-workers") as bus, asyncio.TaskGroup() as tasks:
        prefill = QuickWorker(bus, "quick-prefill", Role.PREFILL, model, 0.0, tokens)
        decode = QuickWorker(bus, "quick-decode", Role.DECODE, model, step_s, tokens)
        loops = [
            prefill.serve(subjects.worker_prefill(prefill.id), prefill.submit_prefill),
            prefill.serve(subjects.worker_cancel(prefill.id), prefill.cancel),
            decode.serve(subjects.worker_decode(decode.id), decode.submit_decode),
            decode.serve(subjects.worker_start(decode.id), decode.start_decode),
            decode.serve(subjects.worker_cancel(decode.id), decode.cancel),
            *(each.steps() for each in (prefill, decode)),
            *(each.beat() for each in (prefill, decode)),
        ]
        running = [tasks.create_task(loop) for loop in loops]
        await stop.wait()
        for task in running:
            task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nats", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--step-ms", type=float, default=0.0, help="time of one decode step")
    parser.add_argument("--tokens", type=int, nargs=2, default=(300, 1000), help="ids that it says: from, up to below")
    given = parser.parse_args()
    uvloop.run(run(given.nats, given.model, given.step_ms / 1e3, range(*given.tokens)))


if __name__ == "__main__":
    main()
