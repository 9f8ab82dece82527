"""Two thousand streams at once through one ingress for ten minutes: is its memory flat, and does every stream go on?

    python bench/soak_streams.py [--streams 2000] [--minutes 10] [--answer-tokens 240] [--step-ms 250] [--json FILE]

All streams are open all the time: one that has ended is asked anew at once, and they begin spread over an answer's
time. The ingress, planner and nats-server are the real ones; the workers compute nothing (bench/door/quick_workers.py)
and give each stream a token every `step-ms`. Exits with 1 when memory left its mean by more than 5 % after the warm-up,
when a stream waited ten steps or longer for a token, or when an answer was wrong in length or an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import uvloop
from door.model_folder import NAME, make_model_folder
from door.processes import Door, isthmus, raise_file_limit

from isthmus_cli.load.connection import LoadConnection, clock_s, connect
from isthmus_cli.load.plan import Asking, Shape
from isthmus_cli.load.target import Target, parse_target

SAMPLE_S = 5.0
FLAT = 0.05
STARVED_STEPS = 10
WORDS = 24


@dataclass
class Stream:
    """One place among the many; tokens and gaps of the measured time only."""

    tokens: int = 0
    longest_gap_s: float = 0.0
    last_s: float = field(default_factory=clock_s)


class Soak:
    def __init__(self, door: Door, answer_tokens: int, step_s: float) -> None:
        self.door, self.target = door, parse_target(door.url)
        self.answer_tokens, self.step_s = answer_tokens, step_s
        self.streams: list[Stream] = []
        self.errors: Counter[str] = Counter()
        self.answers = 0
        self.rss: list[tuple[float, int]] = []
        self._asking = Asking(NAME)
        self._measuring = False

    async def run(self, streams: int, warmup_s: float, seconds: float) -> dict[str, Any]:
        self.streams = [Stream() for _ in range(streams)]
        async with asyncio.TaskGroup() as tasks:
            begun_s = clock_s()
            running = [
                tasks.create_task(self._hold(stream, number / streams * self.answer_tokens * self.step_s, number))
                for number, stream in enumerate(self.streams)
            ]
            await self._sample(until_s=begun_s + warmup_s)
            self._begin()
            cpu = self.door.cpu_s()
            await self._sample(until_s=begun_s + warmup_s + seconds)
            cpu = {name: used - cpu[name] for name, used in self.door.cpu_s().items()}
            told = self._told(cpu, begun_s + warmup_s, seconds)
            for task in running:
                task.cancel()
        return told

    def _begin(self) -> None:
        self._measuring = True
        for stream in self.streams:
            stream.tokens, stream.longest_gap_s, stream.last_s = 0, 0.0, clock_s()

    async def _sample(self, *, until_s: float) -> None:
        while (left_s := until_s - clock_s()) > 0:
            await asyncio.sleep(min(SAMPLE_S, left_s))
            self.rss.append((clock_s(), self.door.rss_bytes()))

    async def _hold(self, stream: Stream, delay_s: float, seed: int) -> None:
        await asyncio.sleep(delay_s)
        random = Random(seed)
        shape = Shape(WORDS, self.answer_tokens)
        connection: LoadConnection | None = None
        while True:
            if connection is None or connection.closed:
                connection = await self._connect(self.target, stream)
            request = self.target.request(self._asking.path, self._asking.body(shape, random))
            outcome = await connection.ask(request, streams=True)
            if self._measuring:
                self.answers += 1
                if outcome.error is not None or outcome.tokens != self.answer_tokens:
                    self.errors[outcome.error or f"{outcome.tokens} tokens"] += 1

    async def _connect(self, target: Target, stream: Stream) -> LoadConnection:
        connection = await connect(target)

        def on_tokens(count: int) -> None:
            now_s = clock_s()
            stream.tokens += count
            stream.longest_gap_s = max(stream.longest_gap_s, now_s - stream.last_s)
            stream.last_s = now_s

        connection.watch = on_tokens
        return connection

    def _told(self, cpu: dict[str, float], from_s: float, seconds: float) -> dict[str, Any]:
        now_s = clock_s()
        gaps = sorted(max(stream.longest_gap_s, now_s - stream.last_s) for stream in self.streams)
        tokens = sorted(stream.tokens for stream in self.streams)
        rss = [size for at_s, size in self.rss if at_s >= from_s]
        level = sum(rss) / len(rss)
        total = sum(tokens)
        return {
            "streams": len(self.streams),
            "seconds": seconds,
            "answers": self.answers,
            "errors": dict(self.errors),
            "tokens": total,
            "tokens_per_stream": {"least": tokens[0], "median": tokens[len(tokens) // 2], "most": tokens[-1]},
            "longest_gap_s": {"median": round(gaps[len(gaps) // 2], 3), "most": round(gaps[-1], 3)},
            "step_s": self.step_s,
            "ingress_rss_mib": {
                "first": round(rss[0] / 2**20, 1),
                "least": round(min(rss) / 2**20, 1),
                "most": round(max(rss) / 2**20, 1),
                "last": round(rss[-1] / 2**20, 1),
            },
            "rss_off_its_mean": round(max(max(rss) - level, level - min(rss)) / level, 4),
            "cpu_us_per_token": {name: round(used / total * 1e6, 2) for name, used in cpu.items()},
        }


def verdict(told: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    problems = [f"{count} answers: {kind}" for kind, count in told["errors"].items()]
    if told["rss_off_its_mean"] > FLAT:
        problems.append(f"memory was {told['rss_off_its_mean']:.1%} off its mean")
    if told["longest_gap_s"]["most"] >= STARVED_STEPS * told["step_s"]:
        problems.append(f"a stream waited {told['longest_gap_s']['most']} s for a token")
    return problems


async def soak(given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    model = make_model_folder(scratch / "model")
    settings = {"ISTHMUS_INGRESS_REQUEST_TIMEOUT_S": "86400", "ISTHMUS_INGRESS_MAX_IN_FLIGHT": str(2 * given.streams)}
    async with isthmus(model, scratch, step_ms=given.step_ms, settings=settings) as door:
        run = Soak(door, given.answer_tokens, given.step_ms / 1e3)
        warmup_s = given.warmup if given.warmup is not None else 1.5 * given.answer_tokens * given.step_ms / 1e3
        return await run.run(given.streams, warmup_s, given.minutes * 60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=10.0, help="after the warm-up")
    parser.add_argument("--warmup", type=float, help="seconds; default: an answer's time and a half")
    parser.add_argument("--answer-tokens", type=int, default=240)
    parser.add_argument("--step-ms", type=float, default=250.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for the processes' logs; default: a temporary one")
    given = parser.parse_args()
    raise_file_limit()
    with tempfile.TemporaryDirectory(prefix="isthmus-streams-") as scratch:
        folder = Path(scratch) if given.keep is None else given.keep
        folder.mkdir(parents=True, exist_ok=True)
        told = uvloop.run(soak(given, folder))
    text = json.dumps(told, indent=1)
    if given.json is not None:
        given.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    problems = verdict(told)
    print("\n".join(problems) or "memory flat, no stream starved, every answer whole")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
