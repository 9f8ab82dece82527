"""The hand-over over shared memory: a producer's and a consumer's process at one relay."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isthmus_kvrelay.bench.children import Child
from isthmus_kvrelay.bench.contenders import start_relay
from isthmus_kvrelay.bench.workloads import KIB, MIB

HAND_OVER_BYTES = (64 * KIB, MIB, 16 * MIB, 256 * MIB)
HAND_OVERS = 200
WARM_UP = 5


@dataclass(frozen=True, slots=True)
class HandOver:
    """Seconds from the producer's last word (declare the last block, seal) until the consumer's task may read."""

    total_bytes: int
    p50_s: float
    p99_s: float


class HandOverPair:
    def __init__(self, folder: Path) -> None:
        with contextlib.ExitStack() as stack:
            start_relay(stack, folder, "a")
            self._ends = {role: self._end(stack, folder, role) for role in ("producer", "consumer")}
            self._stack = stack.pop_all()

    @staticmethod
    def _end(stack: contextlib.ExitStack, folder: Path, role: str) -> Child:
        child = Child("isthmus_kvrelay.bench.hand_over_process", "--socket", str(folder / "a.sock"), "--role", role)
        stack.callback(child.close)
        child.answer()
        return child

    def series(self, total_bytes: int, count: int) -> list[float]:
        """The consumer waits already, as it does while layer after layer is filled. Both processes' clocks are one."""
        producer, consumer = self._ends["producer"], self._ends["consumer"]
        took_s = []
        for _ in range(count):
            ticket = producer.ask(do="reserve", total_bytes=total_bytes)
            consumer.tell(do="take", ticket=ticket)
            began_s = producer.ask(do="finish")["at_s"]
            took_s.append(float(consumer.answer()["at_s"] - began_s))
        return took_s

    def close(self) -> None:
        self._stack.close()


def measure_hand_overs(folder: Path) -> Iterator[HandOver]:
    pair = HandOverPair(folder)
    try:
        for size in HAND_OVER_BYTES:
            pair.series(size, WARM_UP)
            cuts = statistics.quantiles(pair.series(size, HAND_OVERS), n=100, method="inclusive")
            yield HandOver(size, cuts[49], cuts[98])
    finally:
        pair.close()
