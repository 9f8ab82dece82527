"""Kills and pauses real processes of a real cluster under load, at random, for minutes: `make soak-kills`.

Every answer is compared with one engine's that did everything alone. Each request ends with the right tokens, or with
the right ones as far as it got and then an error that has a code; afterwards nothing is held anywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from isthmus_shared.engines.reference.checkpoint import ensure_tiny_checkpoint
from isthmus_testing.engines import Outcome, prompt_of
from isthmus_testing.local_cluster import START_S, LocalCluster, launched
from isthmus_testing.openai_client import Answer, Case, aggregated, assert_same, client, complete, stream

CLUSTER = """\
planner:
  env: {ISTHMUS_PLANNER_TTFT_FLOOR_S: "15", ISTHMUS_PLANNER_TRANSFER_FLOOR_S: "5", ISTHMUS_PLANNER_STALL_FLOOR_S: "8"}
nodes:
  - id: node-a
    workers:
      - {id: prefill-a, role: prefill, kv_layout: "nhd:16:fp32"}
      - {id: decode-a, role: decode, kv_layout: "nhd:32:fp32"}
  - id: node-b
    workers:
      - {id: prefill-b, role: prefill, kv_layout: "hnd:64:fp32:packed4"}
      - {id: decode-b, role: decode, kv_layout: "hnd:64:fp32:packed4"}
"""
"""Two of each role, so that the loss of one leaves a way; two nodes, so that KV crosses between relays."""
PAUSE_S = (0.2, 6.0)
"""Shorter and longer than what it takes to be given up for dead (two seconds)."""
AGAIN_S = 12.0
"""Between two kills of one process: the supervisor gives one up that crashes again and again right after its start."""
SHARE_KILLED = 0.5
LEAVES_EARLY = 0.1
"""Share of clients that hang up in mid stream."""
ANSWER_S = 90.0
PROMPT_TOKENS, ANSWER_TOKENS = (8, 700), (8, 160)
CASES = 48
AT_ONCE = 8
"""Of them, while the right answers are computed."""


@dataclass
class Tally:
    right: int = 0
    left: int = 0
    """Clients that hung up, as they had meant to."""
    errors: Counter[str] = field(default_factory=Counter)
    """Ended by an error, by its code; `connection`: while the ingress was down or paused."""
    tokens: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    pauses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    untyped: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        return self.kills.total() + self.pauses.total()


class Left(Exception):
    """This client hangs up."""


class Soak:
    def __init__(self, cluster: LocalCluster, expected: Mapping[Case, Outcome], seed: int) -> None:
        self.cluster, self.expected, self.tally = cluster, expected, Tally()
        self._cases = list(expected)
        self._random, self._seed = Random(seed), seed
        self._over = asyncio.Event()
        self._killed_s: dict[str, float] = {}
        self._ingress_hit_s = float("-inf")
        """When the ingress, without which there is no connection, was last killed or let go on."""

    async def run(self, faults: int, seconds: float, clients: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(clients):
                tasks.create_task(self._client(Random(self._seed * 1000 + number)))
            await self._faults(faults, seconds)
            self._over.set()

    # -- faults -------------------------------------------------------------------------------------------------------

    async def _faults(self, count: int, seconds: float) -> None:
        """Spread over the time as by chance; a pause that is under way does not keep the next fault back."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        at_s = sorted(self._random.uniform(0, seconds) for _ in range(count))
        async with asyncio.TaskGroup() as pauses:
            for due_s in at_s:
                await asyncio.sleep(max(0.0, began_s + due_s - loop.time()))
                name, pid = await self._victim()
                if self._random.random() < SHARE_KILLED:
                    self._kill(name, pid)
                else:
                    pauses.create_task(self._pause(name, pid, self._random.uniform(*PAUSE_S)))

    async def _victim(self) -> tuple[str, int]:
        """One that runs, and was not killed just now."""
        loop = asyncio.get_running_loop()
        while True:
            alive = [
                (process.name, process.pid)
                for process in self.cluster.state.processes
                if process.pid is not None and loop.time() - self._killed_s.get(process.name, -AGAIN_S) >= AGAIN_S
            ]
            if alive:
                return self._random.choice(sorted(alive))
            await asyncio.sleep(0.2)

    def _kill(self, name: str, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self._note(name, self.tally.kills)

    async def _pause(self, name: str, pid: int, pause_s: float) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self._note(name, self.tally.pauses)
            try:
                await asyncio.sleep(pause_s)
            finally:
                os.kill(pid, signal.SIGCONT)
                self._note_hit(name)

    def _note(self, name: str, what: Counter[str]) -> None:
        what[name] += 1
        self._killed_s[name] = asyncio.get_running_loop().time()
        self._note_hit(name)

    def _note_hit(self, name: str) -> None:
        if name == "ingress":
            self._ingress_hit_s = asyncio.get_running_loop().time()

    # -- load ---------------------------------------------------------------------------------------------------------

    async def _client(self, random: Random) -> None:
        async with client(self.cluster.url) as http:
            while not self._over.is_set():
                await self._ask(http, random)

    async def _ask(self, http: httpx.AsyncClient, random: Random) -> None:
        case, loop = random.choice(self._cases), asyncio.get_running_loop()
        began_s = loop.time()
        leave_after = random.randrange(1, case.max_tokens) if random.random() < LEAVES_EARLY else None
        seen = 0

        async def on_tokens() -> None:
            nonlocal seen
            seen += 1
            if leave_after is not None and seen >= leave_after:
                raise Left

        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await (stream(http, case, on_tokens) if random.random() < 0.7 else complete(http, case))
        except Left:
            self.tally.left += 1
        except (httpx.TransportError, httpx.StreamError) as error:
            if self._ingress_hit_s < began_s - ANSWER_S / 10:
                self.tally.untyped.append(f"{type(error).__name__}: {error}, and the ingress was well")
            self.tally.errors["connection"] += 1
            await asyncio.sleep(0.5)
        except TimeoutError:
            self.tally.untyped.append(f"no end within {ANSWER_S:g} s")
        else:
            await self._judge(case, answer)

    async def _judge(self, case: Case, answer: Answer) -> None:
        right = self.expected[case]
        self.tally.tokens += len(answer.token_ids)
        if answer.error is None:
            try:
                assert_same(answer, right)
                self.tally.right += 1
            except AssertionError as error:
                cut = len(answer.token_ids) < len(right.tokens) and answer.finish is None
                if cut and answer.token_ids == right.tokens[: len(answer.token_ids)]:
                    self.tally.errors["connection"] += 1  # the ingress died, and with it the stream
                    if asyncio.get_running_loop().time() - self._ingress_hit_s > ANSWER_S / 10:
                        self.tally.untyped.append("a stream ended early, and the ingress was well")
                else:
                    self.tally.wrong.append(f"{case}: {error}")
            return
        code = answer.error.get("code")
        self.tally.errors[str(code)] += 1
        if not code or code == "internal_error" or not answer.error.get("message"):
            self.tally.untyped.append(f"an error without a proper code: {answer.error}")
        if answer.token_ids != right.tokens[: len(answer.token_ids)]:
            self.tally.wrong.append(f"{case}: wrong before its error: {answer.token_ids}")
        await asyncio.sleep(0.2)  # as a client that was told to come back does

    async def leaks(self) -> str:
        """What is still held when everything had time to settle; empty if nothing is."""
        try:
            await self.cluster.until_idle()
        except AssertionError as error:
            return str(error).splitlines()[0]
        async with client(self.cluster.url) as http:
            for case in self._cases:
                assert_same(await complete(http, case), self.expected[case])
        return ""


def cases(seed: int) -> list[Case]:
    random = Random(seed)
    return [
        Case(
            prompt_of(random.randint(*PROMPT_TOKENS), seed=number),
            max_tokens=random.randint(*ANSWER_TOKENS),
            temperature=random.choice([0.0, 0.0, 0.8]),
            seed=number,
        )
        for number in range(CASES)
    ]


def soak(faults: int, seconds: float, clients: int, seed: int, folder: Path) -> dict[str, Any]:
    model = ensure_tiny_checkpoint(folder / "tiny")
    asked = cases(seed)
    expected: dict[Case, Outcome] = {}
    for at in range(0, len(asked), AT_ONCE):
        some = asked[at : at + AT_ONCE]
        expected |= zip(some, asyncio.run(aggregated(model, some)), strict=True)
    (folder / "cluster.yaml").write_text(CLUSTER, encoding="utf-8")
    with launched([str(folder / "cluster.yaml"), "--model", str(model)], folder / "state") as cluster:
        ready = cluster.until_event("ready", START_S)
        cluster.url, cluster.bus_url = ready["http_url"], cluster.state.bus_url

        async def play() -> tuple[Soak, str]:
            run = Soak(cluster, expected, seed)
            await run.run(faults, seconds, clients)
            return run, await run.leaks()

        run, leak = asyncio.run(play())
        if (status := cluster.stop()) != 0:
            leak = leak or f"the cluster ended with {status}"
        forbidden = len(cluster.forbidden())
    about = {"seed": seed, "seconds": seconds, "clients": clients, "faults": run.tally.faults}
    return {**about, **vars(run.tally), "forbidden": forbidden, "leaks": leak}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kill and pause processes of a cluster under load.")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock")
    parser.add_argument("--json", type=Path, help="write the tally there as well")
    parser.add_argument("--keep", type=Path, help="the cluster's folder with its logs; default: a temporary one")
    given = parser.parse_args(argv)
    seed = time.time_ns() % 2**31 if given.seed is None else given.seed
    with tempfile.TemporaryDirectory(prefix="isthmus-soak-") as scratch:
        folder = Path(scratch) if given.keep is None else given.keep
        folder.mkdir(parents=True, exist_ok=True)
        found = soak(given.faults, given.minutes * 60, given.clients, seed, folder)
    text = json.dumps(found, indent=1)
    if given.json is not None:
        given.json.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")
    bad = bool(found["wrong"] or found["untyped"] or found["leaks"] or not found["right"])
    sys.stdout.write("FAILED\n" if bad else "nothing wrong, nothing left, every error typed\n")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
