"""What the connector counts: transfers, bytes, and the time that its hooks take of each step."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

REPORT_S = 1.0
"""Between two reports of hook times to vLLM; ended transfers are reported at once."""
MAX_STEPS = 4096
"""Steps whose hook times one report may hold; more than any engine makes in `REPORT_S`."""


class Report(TypedDict):
    """Sums, and a list for each distribution. JSON values: it crosses processes."""

    saved: int
    saved_bytes: int
    saves_failed: int
    loaded: int
    loaded_bytes: int
    loads_failed: int
    load_s: list[float]
    worker_hook_us: list[float]
    """Per step with transfers under way, all hooks of one worker together."""
    scheduler_hook_us: list[float]


def empty_report() -> Report:
    return Report(
        saved=0,
        saved_bytes=0,
        saves_failed=0,
        loaded=0,
        loaded_bytes=0,
        loads_failed=0,
        load_s=[],
        worker_hook_us=[],
        scheduler_hook_us=[],
    )


def merged(one: Report, other: Report) -> Report:
    return Report(
        saved=one["saved"] + other["saved"],
        saved_bytes=one["saved_bytes"] + other["saved_bytes"],
        saves_failed=one["saves_failed"] + other["saves_failed"],
        loaded=one["loaded"] + other["loaded"],
        loaded_bytes=one["loaded_bytes"] + other["loaded_bytes"],
        loads_failed=one["loads_failed"] + other["loads_failed"],
        load_s=one["load_s"] + other["load_s"],
        worker_hook_us=one["worker_hook_us"] + other["worker_hook_us"],
        scheduler_hook_us=one["scheduler_hook_us"] + other["scheduler_hook_us"],
    )


def summary(report: Report) -> dict[str, int | float]:
    """For a log line."""
    found: dict[str, int | float] = {
        "saved": report["saved"],
        "saves failed": report["saves_failed"],
        "loaded": report["loaded"],
        "loads failed": report["loads_failed"],
        "MiB out": round(report["saved_bytes"] / 2**20, 1),
        "MiB in": round(report["loaded_bytes"] / 2**20, 1),
        "p50 load (ms)": round(percentile(report["load_s"], 0.5) * 1e3, 1),
        "p99 worker hooks (us)": round(percentile(report["worker_hook_us"], 0.99), 1),
        "p99 scheduler hooks (us)": round(percentile(report["scheduler_hook_us"], 0.99), 1),
    }
    return found


def percentile(values: list[float], share: float) -> float:
    """Nearest rank; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class TransferStats:
    """Thread-safe. `hook` around each hook, `step_over` behind a step's last."""

    def __init__(self, *, scheduler: bool) -> None:
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._report = empty_report()
        self._step_ns = 0
        self._reported_s = time.monotonic()
        self._news = False
        """A transfer has ended since the last report."""
        self.totals: Counter[str] = Counter()
        """Transfers since the start: saved, saves_failed, loaded, loads_failed."""
        self.recent_hook_us: deque[float] = deque(maxlen=MAX_STEPS)

    @contextmanager
    def hook(self) -> Iterator[None]:
        """On the engine's thread only."""
        began_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self._step_ns += time.perf_counter_ns() - began_ns

    def step_over(self, *, busy: bool) -> None:
        """`busy`: transfers are under way; of other steps nothing is kept."""
        if busy:
            self.recent_hook_us.append(self._step_ns / 1e3)
            with self._lock:
                times = self._report["scheduler_hook_us" if self._scheduler else "worker_hook_us"]
                if len(times) < MAX_STEPS:
                    times.append(self._step_ns / 1e3)
        self._step_ns = 0

    def saved(self, size_bytes: int) -> None:
        with self._lock:
            self._report["saved"] += 1
            self.totals["saved"] += 1
            self._news = True
            self._report["saved_bytes"] += size_bytes

    def save_failed(self) -> None:
        with self._lock:
            self._report["saves_failed"] += 1
            self.totals["saves_failed"] += 1
            self._news = True

    def loaded(self, size_bytes: int, took_s: float) -> None:
        with self._lock:
            self._report["loaded"] += 1
            self.totals["loaded"] += 1
            self._news = True
            self._report["loaded_bytes"] += size_bytes
            self._report["load_s"].append(took_s)

    def load_failed(self) -> None:
        with self._lock:
            self._report["loads_failed"] += 1
            self.totals["loads_failed"] += 1
            self._news = True

    def take(self) -> Report | None:
        """What has come together since the last time; None if no transfer has ended and that is no `REPORT_S` ago."""
        if not self._news and time.monotonic() - self._reported_s < REPORT_S:
            return None
        with self._lock:
            report, self._report, self._news = self._report, empty_report(), False
        self._reported_s = time.monotonic()
        return report
